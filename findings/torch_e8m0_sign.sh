#!/usr/bin/env bash
# torch 2.13.0 and ml_dtypes 0.5.4: a block scale of 0 or below is NaN in one and a power of two in the other.
#
# Expected: float8_e8m0fnu, the type of microscaling formats' block scales, holds powers of two only. A value that it
#   cannot hold, such as 0 or a negative one, becomes NaN wherever it is converted.
# Seen: torch drops the sign and takes 0 for the smallest scale, with no error; ml_dtypes gives NaN for both. Positive
#   values agree: both round the exponent to the nearest, ties up, and not towards the larger power.
# Matters for: MXFP8 and MXFP4 folders. The scale of a block whose values are all 0 is finite when torch wrote it and
#   poisons a row when numpy or JAX did, and a wrong sign in a scale leaves no trace in torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import ml_dtypes
import numpy as np
import torch

VALUES = np.array([-1, -6, 0, 1.4, 1.5, 3], np.float32)
by_torch = torch.from_numpy(VALUES).to(torch.float8_e8m0fnu).float().tolist()
by_numpy = VALUES.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32).tolist()
print(f"torch {by_torch}")
print(f"ml_dtypes {by_numpy}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ml_dtypes==0.5.4 numpy==2.2.6
seen=$("$folder/venv/bin/python" -W ignore "$folder/show.py")
printf -- '-1, -6, 0, 1.4, 1.5 and 3 as float8_e8m0fnu, torch 2.13.0 and ml_dtypes 0.5.4\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
torch [1.0, 8.0, 5.877471754111438e-39, 1.0, 2.0, 4.0]
ml_dtypes [nan, nan, nan, 1.0, 2.0, 4.0]
SEEN
