#!/usr/bin/env bash
# torchmetrics 1.9.0, sacrebleu 2.6.0, nltk 3.10.4: SacreBLEUScore gives 0 where sacrebleu gives 18, and chrF has three values.
#
# Expected: a metric that is named for sacrebleu, with its tokenizer, gives sacrebleu's figure, which exists so that figures
#   can be compared; chrF of the same texts is one number.
# Seen: where no four words in a row are right, as is common in short texts, sacrebleu smooths by default. SacreBLEUScore
#   gives 0, with smooth=True as well. CHRFScore counts words, too (chrF++), which sacrebleu does on request; nltk weighs
#   recall by 3 in place of 2, and averages F in place of precision and recall. All are called without settings.
# Matters for: figures that are compared with published ones: the libraries' defaults differ, and none says so in its result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import sacrebleu
from nltk.translate.chrf_score import corpus_chrf
from torchmetrics.text import CHRFScore, SacreBLEUScore

answers = ["the cat sat on a mat", "there is a dog in the garden today"]
references = ["a cat is on the mat", "a dog was in the garden"]
lists = [[reference] for reference in references]
print(f"BLEU: sacrebleu {sacrebleu.corpus_bleu(answers, [references]).score:.2f}")
for smooth in (False, True):
    print(f"BLEU: SacreBLEUScore(smooth={smooth}) {100 * SacreBLEUScore(smooth=smooth)(answers, lists).item():.2f}")
print(f"chrF: sacrebleu {sacrebleu.corpus_chrf(answers, [references]).score:.2f}")
print(f"chrF: CHRFScore {100 * CHRFScore()(answers, lists).item():.2f}")
print(f"chrF: nltk {100 * corpus_chrf(references, answers):.2f}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torchmetrics==1.9.0 sacrebleu==2.6.0 nltk==3.10.4 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" 2>"$folder/errors") || { cat "$folder/errors"; exit 1; }
printf 'Scores of the same two answers\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
BLEU: sacrebleu 18.28
BLEU: SacreBLEUScore(smooth=False) 0.00
BLEU: SacreBLEUScore(smooth=True) 0.00
chrF: sacrebleu 46.92
chrF: CHRFScore 48.87
chrF: nltk 45.40
SEEN
