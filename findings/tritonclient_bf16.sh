#!/usr/bin/env bash
# tritonclient 2.73.0 and 2.50.0: the numpy type of a BF16 tensor changed between two minor releases.
#
# Expected: one mapping, as for every other data type of the protocol.
# Seen: 2.50 maps BF16 to float32;
#   2.73 maps BF16 to ml_dtypes.bfloat16 both ways, and its InferInput refuses the float32 array that 2.50 asked for.
# Matters for: clients of BF16 models, which must choose the array's type by the client's release.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

kind = np.dtype(triton_to_np_dtype("BF16")).name
tensor = InferInput("x", [1], "BF16")
try:
    tensor.set_data_from_numpy(np.array([1.0], np.float32))
    taken = "takes float32"
except InferenceServerException:
    taken = "refuses float32"
print(kind, taken)
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "tritonclient[grpc]==$1" "numpy==$2" 'protobuf<7' setuptools
  "$folder/$1/bin/python" "$folder/show.py"
}

before=$(show 2.50.0 1.26.4)
after=$(show 2.73.0 2.2.6)
printf 'tritonclient 2.50.0: %s\ntritonclient 2.73.0: %s\n' "$before" "$after"
[ "$before" = "float32 takes float32" ] && [ "$after" = "bfloat16 refuses float32" ]
