#!/usr/bin/env bash
# rouge_score 0.1.2: an answer in Cyrillic or Chinese that equals its reference scores 0.
#
# Expected: a text compared with itself has ROUGE 1.0 in every language, or the scorer refuses it.
# Seen: the default tokenizer keeps a to z and 0 to 9 and takes everything else for a space. A Russian or Chinese
#   answer has no tokens and scores 0.0 against itself; a German word falls apart at its umlaut, so that "für" equals
#   "f r". There is no warning. A tokenizer of one's own can be passed.
# Matters for: summaries in other languages, where a perfect model, and a broken one, both score 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
from rouge_score.rouge_scorer import RougeScorer

scorer = RougeScorer(["rougeL"])
for reference, answer in (("Москва", "Москва"), ("北京是首都", "北京是首都"), ("für", "f r"), ("for", "for")):
    print(f"{reference} against {answer}: {float(scorer.score(reference, answer)['rougeL'].fmeasure)}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check rouge-score==0.1.2 nltk==3.9.2 numpy==2.2.6 absl-py==2.3.1
seen=$(PYTHONIOENCODING=utf-8 "$folder/venv/bin/python" "$folder/show.py")
printf 'ROUGE-L of rouge_score 0.1.2\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
Москва against Москва: 0.0
北京是首都 against 北京是首都: 0.0
für against f r: 1.0
for against for: 1.0
SEEN
