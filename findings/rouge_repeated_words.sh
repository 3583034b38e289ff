#!/usr/bin/env bash
# rouge 1.0.1: an answer that repeats itself without end scores as if it had said everything once.
#
# Expected: ROUGE counts each word, so that further copies of a word lower the precision of an answer.
# Seen: Rouge() makes a set of the answer's words and one of the reference's. "yes" eight times has ROUGE-1 and ROUGE-L
#   of 1.0 against "yes", and a sentence said three times against itself; rouge_score gives 0.222 and 0.5, and so does
#   Rouge(exclusive=False), a parameter that its README leaves out.
# Matters for: summaries and long answers, which benchmarks score with this package. Text in a loop is the commonest
#   fault of a broken conversion or quantisation, and the score does not fall.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
from rouge import Rouge
from rouge_score.rouge_scorer import RougeScorer

SENTENCE = "the ship left the harbour"
other = RougeScorer(["rouge1", "rougeL"])
for reference, answer in (("yes", "yes " * 8), (SENTENCE, f"{SENTENCE} " * 3)):
    print(f"{answer.strip()!r} for {reference!r}")
    for arguments in ({}, {"exclusive": False}):
        scores = Rouge(["rouge-1", "rouge-l"], **arguments).get_scores(answer, reference)[0]
        print(f"  rouge {arguments}:", " ".join(f"{score['f']:.3f}" for score in scores.values()))
    scores = other.score(reference, answer)
    print("  rouge_score:", " ".join(f"{score.fmeasure:.3f}" for score in scores.values()))
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    rouge==1.0.1 rouge-score==0.1.2 nltk==3.9.2 numpy==2.2.6 absl-py==2.3.1
seen=$("$folder/venv/bin/python" "$folder/show.py")
printf 'ROUGE-1 and ROUGE-L, with rouge 1.0.1 and rouge_score 0.1.2\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
'yes yes yes yes yes yes yes yes' for 'yes'
  rouge {}: 1.000 1.000
  rouge {'exclusive': False}: 0.222 0.222
  rouge_score: 0.222 0.222
'the ship left the harbour the ship left the harbour the ship left the harbour' for 'the ship left the harbour'
  rouge {}: 1.000 1.000
  rouge {'exclusive': False}: 0.500 0.500
  rouge_score: 0.500 0.500
SEEN
