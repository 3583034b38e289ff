#!/usr/bin/env bash
# lm_eval 0.4.13: MGSM's tasks grade 7.5 and -75 as right answers for 75.
#
# Expected: exact_match with ignore_punctuation passes over a full stop or a comma that ends an answer or groups digits.
# Seen: all marks are removed from both texts, the minus sign and the decimal point among them. Some 200 task files of the
#   harness set it, those of MGSM, AfriMGSM and other sums among them, whose filter takes care to extract signs and points.
#   GSM8K's list of regexes_to_ignore keeps both.
# Matters for: scores of arithmetic in other languages: errors of sign and of a power of ten count as right, which are
#   what a broken or quantised model makes; figures of MGSM and GSM8K of one model are not comparable.
# The settings are those of the harness's own file, with rows of our own in place of the downloaded ones.
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
tasks = Path(lm_eval.__file__).parent / "tasks"
ANSWERS = ("75", "7.5", "-75", "57")


class Answers(LM):
    """A model that answers each question with its text."""

    def generate_until(self, requests):
        return [request.args[0] for request in requests]

    loglikelihood = loglikelihood_rolling = None


(folder / "rows.jsonl").write_text("\n".join(json.dumps({"answer": answer, "target": "75"}) for answer in ANSWERS))
for name, file in (("mgsm", tasks / "mgsm/direct/direct_yaml"), ("gsm8k", tasks / "gsm8k/gsm8k.yaml")):
    (folder / f"{name}.yaml").write_text(f"""
include: {file}
task: own_{name}
tag: null
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
training_split: null
fewshot_split: null
num_fewshot: 0
doc_to_text: "{{{{answer}}}}"
doc_to_target: "{{{{target}}}}"
""")
    report = lm_eval.simple_evaluate(
        model=Answers(), tasks=[f"own_{name}"], bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False))
    for sample in report["samples"][f"own_{name}"]:
        if sample["filter"] == "flexible-extract":
            print(f"{name}: {sample['filtered_resps'][0]} for {sample['target']}: {float(sample['exact_match'])}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'lm_eval[api]==0.4.13' datasets==5.0.1 numpy==2.2.6
seen=$(HF_HOME=$folder/cache HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/show.py" "$folder" 2>"$folder/errors") || {
  cat "$folder/errors"
  exit 1
}
printf 'Grades by the settings of MGSM and GSM8K in lm_eval 0.4.13\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
mgsm: 75 for 75: 1.0
mgsm: 7.5 for 75: 1.0
mgsm: -75 for 75: 1.0
mgsm: 57 for 75: 0.0
gsm8k: 75 for 75: 1.0
gsm8k: 7.5 for 75: 0.0
gsm8k: -75 for 75: 0.0
gsm8k: 57 for 75: 0.0
SEEN
