#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: the last layer of an EXAONE 4 has a window, and a pattern of letters is refused.
#
# Expected: Exaone4Config documents sliding_window_pattern as a number or as letters such as "LLLG", the same as 4, and
#   says that the final layer attends to all tokens whatever the pattern.
# Seen: of 6 layers with the pattern 4 the last has a window, since only every fourth layer attends to all tokens. The
#   letters end with a TypeError unless layer_types is given next to them, as in the published 32B.
# Matters for: a model cut to, or trained with, a number of layers that the pattern does not divide, and other
#   implementations written after the documentation: their last layer sees more tokens than that of transformers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
from transformers import Exaone4Config

layers = Exaone4Config(num_hidden_layers=6, sliding_window_pattern=4).layer_types
print("4 in 6 layers:", " ".join(layer.removesuffix("_attention") for layer in layers))
try:
    print("LLLG:", Exaone4Config(num_hidden_layers=6, sliding_window_pattern="LLLG").layer_types)
except TypeError as error:
    print("LLLG:", type(error).__name__)
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" numpy==2.2.6
  "$folder/$1/bin/python" "$folder/show.py" 2>/dev/null
}

expected=$'4 in 6 layers: sliding sliding sliding full sliding sliding\nLLLG: TypeError'
for release in 4.57.6 5.24.0; do
  seen=$(show "$release")
  printf 'transformers %s:\n%s\n' "$release" "$seen"
  [ "$seen" = "$expected" ]
done
