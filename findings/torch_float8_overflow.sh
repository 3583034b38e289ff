#!/usr/bin/env bash
# torch 2.13.0 and ml_dtypes 0.5.4: a value beyond float8_e4m3fn's range is 448 in one and NaN in the other.
#
# Expected: one name of a type, one conversion. Both round 464 to 448, and both give infinity beyond float8_e5m2's range.
# Seen: float32 to float8_e4m3fn takes everything from 465 on, infinity too, to 448 in torch, and to NaN in ml_dtypes,
#   the types of JAX and of safetensors.numpy. torch's float8_e5m2 gives infinity, so torch saturates in one and not
#   in the other.
# Matters for: FP8 weights and scales, whose overflow is silent in torch and poisons a row in JAX; and for
#   comparisons of folders that were quantized by one with the arithmetic of the other.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import ml_dtypes
import numpy as np
import torch

VALUES = np.array([464, 465, 1000, -1e9, np.inf, 61440], np.float32)
for name in ("float8_e4m3fn", "float8_e5m2"):
    by_torch = torch.from_numpy(VALUES).to(getattr(torch, name)).float().tolist()
    by_numpy = VALUES.astype(getattr(ml_dtypes, name)).astype(np.float32).tolist()
    print(f"{name}: torch {by_torch}, ml_dtypes {by_numpy}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ml_dtypes==0.5.4 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py")
printf '464, 465, 1000, -1e9, inf and 61440 with torch 2.13.0 and ml_dtypes 0.5.4\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
float8_e4m3fn: torch [448.0, 448.0, 448.0, -448.0, 448.0, 448.0], ml_dtypes [448.0, nan, nan, nan, nan, nan]
float8_e5m2: torch [448.0, 448.0, 1024.0, -inf, inf, inf], ml_dtypes [448.0, 448.0, 1024.0, -inf, inf, inf]
SEEN
