#!/usr/bin/env bash
# lm_eval 0.4.13: the right answer is graded as wrong where a target is a template and looks like Python.
#
# Expected: doc_to_target: answer and doc_to_target: "{{answer}}" mean the same field of a row, a text.
# Seen: the result of a template is read as Python if it consists of digits (next to choices) or stands in brackets. Of
#   the choices 2, 3, 4 and 1 the answer "2" is then the third, 4. The target ["a", "b"] becomes ['a', 'b'] and [1,2]
#   becomes [1, 2], and the model's answer, the same text to the letter, gets 0. A bare field name stays a text.
# Matters for: tasks of arithmetic, of lists and of tool calls: a perfect model gets 0.0, and nothing says why.
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


class Answer(LM):
    """A model that gives the row's own answer."""

    def __init__(self, text):
        super().__init__()
        self.text = text

    def generate_until(self, requests):
        return [self.text for _ in requests]

    def loglikelihood(self, requests):
        return [(0.0 if request.args[1].strip() == self.text else -9.0, False) for request in requests]

    loglikelihood_rolling = None


def grade(name, row, kind, metric, target):
    (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (folder / f"{name}.yaml").write_text(f"""
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
output_type: {kind}
doc_to_text: question
doc_to_target: {json.dumps(target)}
{'doc_to_choice: choices' if 'choices' in row else ''}
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
""")
    report = lm_eval.simple_evaluate(
        model=Answer(row["answer"]), tasks=[name], bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False))
    return f"{metric} {float(report['results'][name][f'{metric},none'])}"


rows = (
    ({"question": "1+1=", "choices": ["2", "3", "4", "1"], "answer": "2"}, "multiple_choice", "acc"),
    ({"question": "Letters:", "answer": '["a", "b"]'}, "generate_until", "exact_match"),
    ({"question": "Numbers:", "answer": "[1,2]"}, "generate_until", "exact_match"),
    ({"question": "Word:", "answer": "two"}, "generate_until", "exact_match"),
)
for number, (row, kind, metric) in enumerate(rows):
    field = grade(f"field{number}", row, kind, metric, "answer")
    template = grade(f"template{number}", row, kind, metric, "{{answer}}")
    print(f"{row['answer']} of {row.get('choices', 'no choices')}: field {field}, template {template}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'lm_eval[api]==0.4.13' datasets==5.0.1 numpy==2.2.6
seen=$(HF_HOME=$folder/cache "$folder/venv/bin/python" "$folder/show.py" "$folder" 2>"$folder/errors") || { cat "$folder/errors"; exit 1; }
printf 'Grades of the right answer, with lm_eval 0.4.13\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
2 of ['2', '3', '4', '1']: field acc 1.0, template acc 0.0
["a", "b"] of no choices: field exact_match 1.0, template exact_match 0.0
[1,2] of no choices: field exact_match 1.0, template exact_match 0.0
two of no choices: field exact_match 1.0, template exact_match 1.0
SEEN
