#!/usr/bin/env bash
# rouge_score 0.1.2: the average that BootstrapAggregator gives is not the mean, and is another one in each run.
#
# Expected: `mid` of AggregateScore is the mean of the scores that were added, and low and high are the bounds of its
#   interval; the same answers have the same figure in every run.
# Seen: all three are percentiles of 1000 random resamples, drawn from numpy's global generator, which nothing seeds: `mid` is the
#   median of their means. Of 100 scores it differs from the mean, and from run to run, in the third or fourth digit.
# Matters for: gates and comparisons by ROUGE, also through `evaluate`, whose rouge aggregates so by default: two runs
#   of one model differ in the fourth digit, and a limit near the figure holds in one run and not in the next.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import random
from statistics import fmean

from rouge_score.rouge_scorer import RougeScorer
from rouge_score.scoring import BootstrapAggregator

words = "the ship left harbour at noon with all hands and a cargo of tea".split()
choose = random.Random(0)
scorer = RougeScorer(["rougeL"])
scores = [scorer.score(" ".join(words), " ".join(choose.sample(words, choose.randint(1, 14)))) for _ in range(100)]
mean = fmean(score["rougeL"].fmeasure for score in scores)
averages = []
for _ in range(10):
    aggregator = BootstrapAggregator()
    for score in scores:
        aggregator.add_scores(score)
    averages.append(aggregator.aggregate()["rougeL"].mid.fmeasure)
print("different averages in ten runs:", len({round(average, 6) for average in averages}) > 5)
print("runs that give the mean:", sum(abs(average - mean) < 1e-9 for average in averages))
print("all within 0.003 of the mean:", all(abs(average - mean) < 0.003 for average in averages))
print(f"# mean {mean:.4f}, averages {' '.join(f'{average:.4f}' for average in averages)}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check rouge-score==0.1.2 numpy==2.2.6 nltk==3.10.4 absl-py==2.5.1
seen=$("$folder/venv/bin/python" "$folder/show.py")
printf 'Average ROUGE-L of the same 100 answers, with rouge_score 0.1.2\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen" | grep -v '^#') <<'SEEN'
different averages in ten runs: True
runs that give the mean: 0
all within 0.003 of the mean: True
SEEN
