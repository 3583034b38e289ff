#!/usr/bin/env bash
# transformers 5.24.0, nvidia-modelopt 0.47.0: a folder in FP8 as ModelOpt exports it loads as another model.
#
# Expected: from_pretrained dequantises the matrices, or refuses a quantisation that it does not know.
# Seen: export_hf_checkpoint states quant_method "modelopt", which vLLM and TensorRT-LLM read. transformers logs "Unknown
#   quantization type", drops the scales as unexpected keys, and takes the codes of FP8 for the weights in the model's type:
#   its logits are not near those of the quantised model, which are within a tenth of the original's.
# Matters for: references of evaluations and proofs that transformers computes of such folders; the fault is in a warning
#   alone, among those of every load.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import sys

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, architectures=["LlamaForCausalLM"],
)
ids = torch.arange(1, 33)[None]


@torch.no_grad()
def logits(model):
    return model(ids).logits.float()


def distance(other):
    return float((other - original).abs().max() / original.abs().max())


model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
original = logits(model)
model = mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda each: each(ids))
quantised = logits(model)
export_hf_checkpoint(model, export_dir=sys.argv[1])
loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
largest = float(loaded.model.layers[0].mlp.up_proj.weight.abs().max())
print("quantised model near the original:", distance(quantised) < 0.1)
print("loaded folder near the original:", distance(logits(loaded)) < 0.5)
print("largest weight as loaded:", largest)
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  torch==2.13.0 transformers==5.24.0 nvidia-modelopt==0.47.0 numpy==2.2.6 requests==2.32.5
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder/fp8" 2>/dev/null | grep -E '^(quantised model|loaded folder|largest)')
printf 'transformers 5.24.0, nvidia-modelopt 0.47.0:\n%s\n' "$seen"
[ "$seen" = 'quantised model near the original: True
loaded folder near the original: False
largest weight as loaded: 448.0' ]
