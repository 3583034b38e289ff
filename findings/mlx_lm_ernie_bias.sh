#!/usr/bin/env bash
# mlx-lm 0.32.2, transformers 5.24.0: an ERNIE 4.5 mixture loses the bias by which it chooses its experts.
#
# Expected: a tensor of the checkpoint that decides which experts a token goes to is loaded, as mlx-lm does for DeepSeek-V3,
#   or is reported like any other tensor that has no place in the model.
# Seen: moe_statics.e_score_correction_bias is removed before the weights are compared with the model, without a word. The
#   best experts are taken by the plain scores: the logits are those of the same folder with all biases zero.
# Matters for: conversion, quantisation and training of ERNIE 4.5 mixtures by mlx-lm: the tensor is in none of the folders that
#   it writes, and tokens go to other experts than they were trained with.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json
import pathlib
import sys

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

mx.set_default_device(mx.cpu)
ids = torch.arange(1, 33)[None]
torch.manual_seed(0)
model = Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, moe_num_experts=8, moe_k=2,
    moe_num_shared_experts=1, moe_layer_start_index=0, moe_layer_end_index=1, initializer_range=0.2)).eval()
biases = [layer.mlp.gate.moe_statics.e_score_correction_bias for layer in model.model.layers]


@torch.no_grad()
def logits():
    return model(ids).logits.numpy()


unbiased = logits()
for bias in biases:
    torch.nn.init.normal_(bias)
biased = logits()
folder = pathlib.Path(sys.argv[1]) / "ernie"
model.save_pretrained(folder)
settings = json.loads((folder / "config.json").read_text())
settings["rope_theta"] = settings["rope_parameters"]["rope_theta"]  # the key that mlx-lm reads
(folder / "config.json").write_text(json.dumps(settings))
loaded = np.array(load_model(folder)[0](mx.array(ids.numpy())))
stored = mx.load(str(folder / "model.safetensors"))
print("biases in the folder:", sum("e_score_correction_bias" in name for name in stored))
print("logits with the biases:", np.allclose(loaded, biased, rtol=1e-3, atol=1e-3))
print("logits with zeros in their place:", np.allclose(loaded, unbiased, rtol=1e-3, atol=1e-3))
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  transformers==5.24.0 mlx-lm==0.32.2 "mlx[cpu]==0.32.4" numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder" 2>/dev/null)
printf 'mlx-lm 0.32.2:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
biases in the folder: 2
logits with the biases: False
logits with zeros in their place: True
SEEN
