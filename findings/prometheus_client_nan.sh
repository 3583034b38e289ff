#!/usr/bin/env bash
# prometheus_client 0.26.0: after one NaN a histogram's sum is NaN for good, and its count lacks an observation.
#
# Expected: an observation that is not a number is refused or counted; Histogram and Summary of one series agree.
# Seen: a Histogram adds it to the sum, which stays NaN until the process ends, and to no bucket: its count is one less than
#   that of a Summary with the same observations, which counts it. A Counter takes NaN, too, and refuses only negative values.
#   None gives a warning.
# Matters for: times per token and acceptance rates, which are 0/0 for an answer without a second token: from the first such
#   request on every average of the series is empty in dashboards, in all later windows, and alerts on it never fire.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import math

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest

registry = CollectorRegistry()
histogram = Histogram("time_per_token", "Seconds", buckets=[0.1, 1], registry=registry)
summary = Summary("time_in_summary", "Seconds", registry=registry)
counter = Counter("seconds", "Seconds", registry=registry)
for value in (0.05, math.nan, 0.5, 0.05):
    histogram.observe(value)
    summary.observe(value)
    counter.inc(value)
for line in generate_latest(registry).decode().splitlines():
    if not line.startswith("#") and "_created" not in line:
        print(line)
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check prometheus-client==0.26.0
seen=$("$folder/venv/bin/python" "$folder/show.py")
printf 'Three observations and a NaN in prometheus_client 0.26.0\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
time_per_token_bucket{le="0.1"} 2.0
time_per_token_bucket{le="1.0"} 3.0
time_per_token_bucket{le="+Inf"} 3.0
time_per_token_count 3.0
time_per_token_sum NaN
time_in_summary_count 4.0
time_in_summary_sum NaN
seconds_total NaN
SEEN
