#!/usr/bin/env bash
# accelerate 1.15.0, torch 2.13.0: without a GPU an FSDP plugin is accepted, and nothing is sharded.
#
# Expected: `Accelerator(fsdp_plugin=...)` in two processes of torchrun shards the model over both, with gloo, or an
#   error says that FSDP needs an accelerator.
# Seen: with `cpu=True` the model is wrapped by DistributedDataParallel: each process keeps all of it. Without `cpu=True`
#   nothing is distributed at all: each process believes that it is alone, and trains a model of its own. No error or
#   warning in either case.
# Matters for: readers of FSDP's checkpoints that are tested on machines without a GPU. What those tests save are not
#   the files of FSDP.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check accelerate==1.15.0 torch==2.13.0

cat >"$folder/show.py" <<'PY'
import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin

plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
accelerator = Accelerator(cpu=sys.argv[1] == "cpu", fsdp_plugin=plugin)
model = accelerator.prepare(torch.nn.Linear(4, 4))
kept = sum(each.numel() for each in model.parameters())
print(f"{accelerator.num_processes} processes, {type(model).__name__}, {kept} of 20 numbers", flush=True)
PY

show() {
  CUDA_VISIBLE_DEVICES="" "$folder/venv/bin/torchrun" --nproc-per-node 2 \
    --rdzv-backend c10d --rdzv-endpoint localhost:0 "$folder/show.py" "$1" 2>"$folder/$1.err"
}
seen=$(show cpu; show default)
printf '%s\n' "$seen"
one_cpu='2 processes, DistributedDataParallel, 20 of 20 numbers'
one_default='1 processes, Linear, 20 of 20 numbers'
[ "$seen" = "$(printf '%s\n' "$one_cpu" "$one_cpu" "$one_default" "$one_default")" ]
! grep -i -E 'fsdp|shard' "$folder/cpu.err" "$folder/default.err"
