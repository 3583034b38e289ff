#!/usr/bin/env bash
# lm_eval 0.4.13: where a row has several references, every score of an answer above 0 is counted as 1.
#
# Expected: an answer is as good as it is against the best of its references, by whatever metric the task has.
# Seen: doc_to_target gives one text: the metric's value is averaged, here 0.125. It gives a list, with that text in it: the
#   metric is computed against each, and the row's score is 1.0 if any value is not 0. That is right for exact_match;
#   overlaps and F1 of a task's own function become "shares a word with a reference". Nothing is logged.
# Matters for: free-form answers and summaries with several references: a bad model has 1.0, and with one reference
#   per row the same answers have an eighth of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/metrics.py" <<'PY'
def overlap(references, predictions):
    expected, given = set(references[0].split()), set(predictions[0].split())
    return len(expected & given) / len(expected | given)
PY

cat >"$folder/show.py" <<'PY'
import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

folder = Path(sys.argv[1])


class Answers(LM):
    """A model that gives one answer to each question."""

    def generate_until(self, requests):
        return ["the blue boat sank at night" for _ in requests]

    loglikelihood = loglikelihood_rolling = None


row = {"question": "?", "one": "the red ship", "list_of_one": ["the red ship"], "list_of_two": ["the red ship", "all hands"]}
(folder / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 2))
for name in ("one", "list_of_one", "list_of_two"):
    (folder / f"{name}.yaml").write_text(f"""
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: {name}
metric_list:
  - metric: !function metrics.overlap
    aggregation: mean
    higher_is_better: true
""")
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    report = lm_eval.simple_evaluate(model=Answers(), tasks=[name], bootstrap_iters=0, task_manager=manager)
    print(f"{json.dumps(row[name])}: {float(report['results'][name]['overlap,none'])}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'lm_eval[api]==0.4.13' datasets==5.0.1 numpy==2.2.6
seen=$(HF_HOME=$folder/cache HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/show.py" "$folder" 2>"$folder/errors") || {
  cat "$folder/errors"
  exit 1
}
printf 'Score of "the blue boat sank at night" by its references, with lm_eval 0.4.13\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
"the red ship": 0.125
["the red ship"]: 1.0
["the red ship", "all hands"]: 1.0
SEEN
