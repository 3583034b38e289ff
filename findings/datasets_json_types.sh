#!/usr/bin/env bash
# datasets 5.0.1, lm_eval 0.4.13: an answer in a JSON file changes its text by what stands in the other rows.
#
# Expected: load_dataset("json") gives a row what json.loads gives: the text "2015-03-01" and the number 7.
# Seen: a column of texts that all look like dates becomes one of datetimes, and the answer "2015-03-01 00:00:00"; with
#   another text in one row all stay as they are. One 2.5 among whole numbers turns 7 into 7.0, and one number of 20
#   digits makes decimals of all. Nothing is logged.
# Matters for: tasks whose rows are JSON Lines: prompts and targets get the new text, and lm_eval gives 0.0 to a model
#   that answers every row as the file has it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

folder = Path(sys.argv[1])


class Answers(LM):
    """A model that gives the answers of the file."""

    def __init__(self, texts):
        super().__init__()
        self.texts = texts

    def generate_until(self, requests):
        return [self.texts[request.args[0]] for request in requests]

    loglikelihood = loglikelihood_rolling = None


cases = (["2015-03-01", "2016-02-29"], ["2015-03-01", "in May"], [7, 2], [7, 2.5], [12345678901234567890, 5])
for number, answers in enumerate(cases):
    lines = [json.dumps({"question": f"Q{place}", "answer": answer}) for place, answer in enumerate(answers)]
    (folder / f"rows{number}.jsonl").write_text("\n".join(lines))
    (folder / f"task{number}.yaml").write_text(f"""
task: task{number}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows{number}.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
""")
    texts = {f"Q{place}": str(answer) for place, answer in enumerate(answers)}
    report = lm_eval.simple_evaluate(
        model=Answers(texts), tasks=[f"task{number}"], bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False))
    targets = [sample["target"] for sample in report["samples"][f"task{number}"]]
    score = float(report["results"][f"task{number}"]["exact_match,none"])
    print(f"{json.dumps(answers)}: targets {json.dumps(targets)}, exact_match {score}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'lm_eval[api]==0.4.13' datasets==5.0.1 numpy==2.2.6
seen=$(HF_HOME=$folder/cache "$folder/venv/bin/python" "$folder/show.py" "$folder" 2>"$folder/errors") || { cat "$folder/errors"; exit 1; }
printf 'Answers of a file, graded against themselves, with datasets 5.0.1 and lm_eval 0.4.13\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
["2015-03-01", "2016-02-29"]: targets ["2015-03-01 00:00:00", "2016-02-29 00:00:00"], exact_match 0.0
["2015-03-01", "in May"]: targets ["2015-03-01", "in May"], exact_match 1.0
[7, 2]: targets ["7", "2"], exact_match 1.0
[7, 2.5]: targets ["7.0", "2.5"], exact_match 0.5
[12345678901234567890, 5]: targets ["1.2345678901234567e+19", "5.0"], exact_match 0.0
SEEN
