#!/usr/bin/env bash
# torch 2.13.0: a distributed checkpoint loads a count of 5,000,000,000 tokens as 705,032,704, and a weight of 1e6 as infinity.
#
# Expected: torch.distributed.checkpoint.load, which refuses a tensor of another shape, refuses one whose values have no place in
#   the type of the tensor that it fills, or warns.
# Seen: values are cast as by Tensor.copy_: int64 into int32 keeps the lower 32 bits, into int8 the lower 8, fractions are cut
#   off, values beyond fp16 are infinite. Neither the types nor the values are compared; nothing is logged.
# Matters for: resuming with counters or steps of a narrower type, such as tokens seen, which exceed 2^31 in any large run: the
#   schedule restarts elsewhere. Codes of a quantised model that were saved in a wider type arrive wrapped.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import sys
import warnings

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException

warnings.simplefilter("ignore")
for number, (saved, kind) in enumerate((
    (torch.tensor([5_000_000_000]), torch.int32),
    (torch.tensor([300, -200]), torch.int8),
    (torch.tensor([1.75, -0.75]), torch.int64),
    (torch.tensor([1e6, 1.0]), torch.float16),
)):
    folder = f"{sys.argv[1]}/{number}"
    checkpoint.save({"x": saved}, checkpoint_id=folder, no_dist=True)
    state = {"x": torch.zeros(saved.shape, dtype=kind)}
    checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    print(f"{saved.dtype} {saved.tolist()} into {kind}: {state['x'].tolist()}")
try:
    checkpoint.load({"x": torch.zeros(3)}, checkpoint_id=folder, no_dist=True)
except CheckpointException as error:
    print("another shape:", type(error).__name__)
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder" 2>"$folder/errors") || { cat "$folder/errors"; exit 1; }
printf 'Tensors that torch.distributed.checkpoint of torch 2.13.0 saved and loaded\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
torch.int64 [5000000000] into torch.int32: [705032704]
torch.int64 [300, -200] into torch.int8: [44, 56]
torch.float32 [1.75, -0.75] into torch.int64: [1, 0]
torch.float32 [1000000.0, 1.0] into torch.float16: [inf, 1.0]
another shape: CheckpointException
SEEN
