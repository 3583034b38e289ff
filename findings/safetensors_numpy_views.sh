#!/usr/bin/env bash
# safetensors 0.8.0: a transposed or sliced numpy array is written with the values of another one.
#
# Expected: safetensors.numpy.save_file writes the array that numpy shows, or refuses one that is not contiguous, as
#   safetensors.torch.save_file does.
# Seen: it takes the shape of the view and the bytes of the memory under it in their order there. weight.T, an array in
#   Fortran's order and weight[:, ::2] are written with the right shape and the wrong values; loading them gives no error. The
#   same holds for save. np.ascontiguousarray before saving is the cure.
# Matters for: converters in numpy, JAX or TensorFlow, which transpose nearly every matrix: shapes, names and sizes are as
#   expected, and the weights are shuffled.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import sys

import numpy as np
from safetensors.numpy import load, load_file, save, save_file

weight = np.arange(6, dtype=np.float32).reshape(2, 3)
for name, array in {
    "weight": weight,
    "weight.T": weight.T,
    "np.asfortranarray(weight)": np.asfortranarray(weight),
    "weight[:, ::2]": weight[:, ::2],
    "np.ascontiguousarray(weight.T)": np.ascontiguousarray(weight.T),
}.items():
    save_file({"w": array}, sys.argv[1])
    read = load_file(sys.argv[1])["w"]
    assert np.array_equal(read, load(save({"w": array}))["w"])
    print(f"{name} {array.astype(int).tolist()}: {'equal' if np.array_equal(read, array) else read.astype(int).tolist()}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder/w.safetensors")
printf 'Arrays and what safetensors 0.8.0 reads after it wrote them\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
weight [[0, 1, 2], [3, 4, 5]]: equal
weight.T [[0, 3], [1, 4], [2, 5]]: [[0, 1], [2, 3], [4, 5]]
np.asfortranarray(weight) [[0, 1, 2], [3, 4, 5]]: [[0, 3, 1], [4, 2, 5]]
weight[:, ::2] [[0, 2], [3, 5]]: [[0, 1], [2, 3]]
np.ascontiguousarray(weight.T) [[0, 3], [1, 4], [2, 5]]: equal
SEEN
