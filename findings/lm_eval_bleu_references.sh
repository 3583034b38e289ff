#!/usr/bin/env bash
# lm_eval 0.4.13: BLEU counts as many references of each row as the row with the fewest has.
#
# Expected: each answer is compared with all references of its row, as sacrebleu does for rows with different numbers of them.
# Seen: the aggregations bleu, chrf and ter bring the references into sacrebleu's order by zip, which ends with the shortest
#   row. Where one row has a single reference, the second and third of all others are dropped. Answers that equal their
#   second reference have 100; with one more answer, as right as they are, to a row with one reference, all have 22.
#   Nothing is logged.
# Matters for: tasks whose process_results hands lists of references to these metrics, as data sets of several translators
#   or paraphrases need: one short row, or a limit that leaves it out, changes the score of all others.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/process.py" <<'PY'
def process(row, results):
    pair = (row["references"], results[0])
    return {"bleu": pair, "chrf": pair}
PY

cat >"$folder/show.py" <<'PY'
import json
import sys
from pathlib import Path

import lm_eval
import sacrebleu
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

folder = Path(sys.argv[1])


class Answers(LM):
    """A model that answers each question with its text."""

    def generate_until(self, requests):
        return [request.args[0] for request in requests]

    loglikelihood = loglikelihood_rolling = None


whole = [
    {"answer": "the red ship left the harbour", "references": ["a boat sailed away at noon", "the red ship left the harbour"]},
    {"answer": "all hands were on deck", "references": ["the crew stood ready above", "all hands were on deck"]},
]
short = {"answer": "the wind was fair", "references": ["the wind was fair"]}
for name, rows in (("two_each", whole), ("one_has_one", [*whole, short])):
    (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / f"{name}.yaml").write_text(f"""
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: answer
doc_to_target: answer
process_results: !function process.process
metric_list:
  - {{metric: bleu, aggregation: bleu, higher_is_better: true}}
  - {{metric: chrf, aggregation: chrf, higher_is_better: true}}
""")
    report = lm_eval.simple_evaluate(
        model=Answers(), tasks=[name], bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False))["results"][name]
    lists = [[row["references"][place] if place < len(row["references"]) else None for row in rows] for place in range(2)]
    own = sacrebleu.corpus_bleu([row["answer"] for row in rows], lists).score
    print(f"{name}: bleu {report['bleu,none']:.1f}, chrf {report['chrf,none']:.1f}, bleu of sacrebleu {own:.1f}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  'lm_eval[api]==0.4.13' datasets==5.0.1 sacrebleu==2.6.0 numpy==2.2.6
seen=$(HF_HOME=$folder/cache HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/show.py" "$folder" 2>"$folder/errors") || {
  cat "$folder/errors"
  exit 1
}
printf 'Scores of answers that equal one of their references, with lm_eval 0.4.13 and sacrebleu 2.6.0\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
two_each: bleu 100.0, chrf 100.0, bleu of sacrebleu 100.0
one_has_one: bleu 22.3, chrf 31.5, bleu of sacrebleu 100.0
SEEN
