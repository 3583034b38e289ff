#!/usr/bin/env bash
# DeepSpeed 0.19.8: save_16bit_model of a mixture that AutoEP has distributed leaves out the experts of other ranks.
#
# Expected: pytorch_model.bin has all four experts of each layer, or save_16bit_model refuses, as it does in ZeRO stage 3.
# Seen: in stage 1 (and 2) with two ranks it has the two experts of rank 0, under AutoEP's names (experts.w1 of shape
#   (2, ...)). The call returns True, without a warning. save_checkpoint has all experts (layer_*_expert_*), but
#   zero_to_fp32.py ends with an error on them; ds_to_universal.py joins them.
# Matters for: runs that keep only this file. Half of the experts (of N ranks, all but 1/N) are lost.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import os
import sys

import deepspeed
import deepspeed.comm.torch
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

# Shared memory would need a compiler; gloo is the same.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=24, num_hidden_layers=1, head_dim=8,
    num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, max_position_embeddings=32))
engine, *_ = deepspeed.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "qwen3_moe"}})
answer = engine.save_16bit_model(sys.argv[1])
torch.distributed.barrier()
if engine.global_rank == 0:
    saved = torch.load(os.path.join(sys.argv[1], "pytorch_model.bin"))
    found = {name.rpartition("mlp.")[2]: tuple(values.shape) for name, values in saved.items() if ".experts." in name}
    print("save_16bit_model returned", answer)
    print("experts in the model: 4, in the file:", found, flush=True)
os._exit(0)
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 setuptools wheel
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-build-isolation deepspeed==0.19.8
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.22.2
export DS_ACCELERATOR=cpu
seen=$(cd "$folder" && venv/bin/torchrun --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 \
  show.py out 2>"$folder/errors" | grep -E '^(save_16bit_model|experts)')
printf 'DeepSpeed 0.19.8:\n%s\n' "$seen"
[ "$seen" = "save_16bit_model returned True
experts in the model: 4, in the file: {'experts.w1': (2, 24, 16), 'experts.w2': (2, 16, 24), 'experts.w3': (2, 24, 16)}" ]
