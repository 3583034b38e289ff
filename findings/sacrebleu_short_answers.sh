#!/usr/bin/env bash
# sacrebleu 2.6.0, nltk 3.10.4: answers equal to their references have a BLEU of 0 if all are short.
#
# Expected: texts that equal their references have the highest score, 100 or 1.0, however long they are.
# Seen: BLEU of a corpus is the geometric mean of four precisions. If no answer has four words, the fourth is 0 of 0, and
#   sacrebleu's corpus_bleu gives 0.0. One answer of four words among them, and the same texts score 100. nltk, for which every
#   answer has at least one n-gram of each order, gives 9e-78 and 0.68, next to a warning in the first case alone.
#   sacrebleu's sentence_bleu leaves out orders that do not occur, and gives 100 for each answer.
# Matters for: scores of short answers, of subsets and of runs with a limit, also through lm_eval, whose metric `bleu` is
#   sacrebleu's: a perfect model has 0.0, and one row decides between 0 and 100.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import warnings

import sacrebleu
from nltk.translate.bleu_score import corpus_bleu

warnings.simplefilter("ignore")
for texts in (["yes", "the red ship"], ["yes", "the red ship", "it left the harbour"]):
    whole = sacrebleu.corpus_bleu(texts, [texts]).score
    alone = [round(sacrebleu.sentence_bleu(text, [text]).score) for text in texts]
    words = [text.split() for text in texts]
    nltk = corpus_bleu([[each] for each in words], words)
    print(f"{texts}: corpus {whole:.1f}, sentences {alone}, nltk {nltk:.2g}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check sacrebleu==2.6.0 nltk==3.10.4
seen=$("$folder/venv/bin/python" "$folder/show.py")
printf 'BLEU of texts against themselves, with sacrebleu 2.6.0 and nltk 3.10.4\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
['yes', 'the red ship']: corpus 0.0, sentences [100, 100], nltk 9.3e-78
['yes', 'the red ship', 'it left the harbour']: corpus 100.0, sentences [100, 100, 100], nltk 0.68
SEEN
