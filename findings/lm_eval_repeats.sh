#!/usr/bin/env bash
# lm_eval 0.4.13: repeats: 4 asks for four answers to each row and grades the first.
#
# Expected: the score of a task with repeats is the mean over the repeats, which is what they are computed for: a score of
#   sampled answers varies from run to run.
# Seen: a task without a filter of its own takes the first of the answers. Of 16 answers, three right of each four, the score is
#   0.0 if the first ones are wrong. The others are in the log of samples alone; sample_len is the number of rows, and no
#   message names the filter at the default level.
# Matters for: evaluations at a temperature above 0 that set repeats to narrow the error: four times the work, and the error of
#   one run. A filter such as majority_vote or a metric of all answers has to be stated.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import collections
import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

folder = Path(sys.argv[1])


class Answers(LM):
    """A model whose first answer to each question is wrong and whose others are right."""

    def generate_until(self, requests):
        print("answers asked for:", len(requests))
        given = collections.Counter()
        answers = []
        for request in requests:
            given[request.args[0]] += 1
            answers.append("no" if given[request.args[0]] == 1 else "yes")
        return answers

    loglikelihood = loglikelihood_rolling = None


(folder / "rows.jsonl").write_text("\n".join(json.dumps({"question": f"Q{row}", "answer": "yes"}) for row in range(4)))
(folder / "own.yaml").write_text(f"""
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: answer
repeats: 4
generation_kwargs: {{do_sample: true, temperature: 1.0, until: []}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
""")
report = lm_eval.simple_evaluate(
    model=Answers(), tasks=["own"], bootstrap_iters=0, log_samples=True,
    task_manager=TaskManager(include_path=str(folder), include_defaults=False))
print("answers to the first row:", *report["samples"]["own"][0]["resps"][0])
print("exact_match:", float(report["results"]["own"]["exact_match,none"]))
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'lm_eval[api]==0.4.13' datasets==5.0.1 numpy==2.2.6
seen=$(HF_HOME=$folder/cache HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/show.py" "$folder" 2>"$folder/errors") || {
  cat "$folder/errors"
  exit 1
}
printf 'Four rows with repeats: 4, with lm_eval 0.4.13\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
answers asked for: 16
answers to the first row: no yes yes yes
exact_match: 0.0
SEEN
