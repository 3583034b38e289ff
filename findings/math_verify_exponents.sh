#!/usr/bin/env bash
# math_verify 0.9.0: answers that differ by powers of ten are graded as equal.
#
# Expected: numbers that differ by more than rounding are not equal for verify, however they are written.
# Seen: parse drops the exponent of a number that is written with an "e": "1.5e-3" is 1.5, so that 1500 in the same
#   notation is the right answer, and 0.0015 a wrong one. verify rounds decimals to six places, not six digits: an
#   electron's mass and its charge are the same number. In TeX a space between thousands takes part: "$12 500$" is 512.
# Matters for: grading, and rewards in training, of physics and chemistry; both kinds of error are silent.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
from math_verify import parse, verify

for reference, answer in (
    ("1.5e-3", "1.5e3"),
    ("1.5e-3", "0.0015"),
    (r"$1.6\times10^{-19}$", r"$9.1\times10^{-31}$"),
    ("0.0000001", "0.0000004"),
    ("1000000", "1000000.4"),
    ("$12 500$", "$512$"),
    ("$12 500$", "$12500$"),
    ("12 500", "12500"),
):
    verdict = "right" if verify(parse(reference), parse(answer)) else "wrong"
    print(f"{answer} for {reference}: {verdict}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0
seen=$("$folder/venv/bin/python" "$folder/show.py")
printf 'Verdicts of math_verify 0.9.0\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
1.5e3 for 1.5e-3: right
0.0015 for 1.5e-3: wrong
$9.1\times10^{-31}$ for $1.6\times10^{-19}$: right
0.0000004 for 0.0000001: right
1000000.4 for 1000000: wrong
$512$ for $12 500$: right
$12500$ for $12 500$: wrong
12500 for 12 500: right
SEEN
