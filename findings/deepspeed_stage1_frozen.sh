#!/usr/bin/env bash
# DeepSpeed 0.19.8: zero_to_fp32.py of a checkpoint of ZeRO stage 1 leaves out every frozen parameter.
#
# Expected: the script, which each checkpoint folder contains, writes all weights of the model, as it does for stage 2.
# Seen: parameters with requires_grad=False are not in an optimizer; stages 2 and 3 store them separately for this script,
#   and stage 1 does not. It counts the trained parameters as if they were all, and ends with status 0. What stage 1 has
#   of the frozen ones is in mp_rank_00_model_states.pt.
# Matters for: runs with a frozen embedding, vision tower or base model of which only the script's output is kept. A program
#   that loads it without strict keys leaves those weights as they were initialised.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import sys

import deepspeed
import deepspeed.comm.torch
import torch

# Shared memory would need a compiler; gloo is the same.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
deepspeed.init_distributed("gloo")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
model[0].requires_grad_(False)
engine, *_ = deepspeed.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": int(sys.argv[2])},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}})
engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
engine.step()
engine.save_checkpoint(sys.argv[1])
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 setuptools wheel
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-build-isolation deepspeed==0.19.8 huggingface_hub==2.4.0
export DS_ACCELERATOR=cpu
seen=$(cd "$folder" && for stage in 1 2; do
  venv/bin/torchrun --rdzv-backend c10d --rdzv-endpoint localhost:0 show.py "stage$stage" "$stage" >/dev/null 2>&1
  venv/bin/python "stage$stage/zero_to_fp32.py" "stage$stage" "stage$stage/weights" >/dev/null 2>&1
  venv/bin/python -c "import torch; print('stage $stage:', list(torch.load('stage$stage/weights/pytorch_model.bin')))"
done)
printf 'DeepSpeed 0.19.8, model with 0.weight and 0.bias frozen:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
stage 1: ['1.weight', '1.bias']
stage 2: ['0.weight', '0.bias', '1.weight', '1.bias']
SEEN
