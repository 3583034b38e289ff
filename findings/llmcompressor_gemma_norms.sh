#!/usr/bin/env bash
# llm-compressor 0.14.0.1: to quantise a Gemma rounds its norms, too.
#
# Expected: a scheme that quantises linear layers and is given no data leaves every norm as it was.
# Seen: Gemma's norms multiply by 1 + weight. Around every recipe `oneshot` turns them into plain norms, in the type of
#   the model, and back: in bf16 a weight w becomes bf16(1 + w) - 1, off by up to 0.004 here. The same holds for
#   Qwen3-Next and Qwen3.5. In fp32 next to nothing is lost.
# Matters for: comparisons of a quantised folder with its source. A certificate names these norms as changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import sys

import torch
from llmcompressor.modeling.offset_norm import norm_calibration_context
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads)).to(torch.bfloat16)
norm = model.model.layers[0].input_layernorm
norm.weight.data.normal_(0, 0.3)
before = norm.weight.detach().clone()
with norm_calibration_context(model):
    pass  # as `oneshot` does around a recipe
after = norm.weight.detach()
rounded = ((1 + before.float()).bfloat16().float() - 1).bfloat16()
changed = int((after != before).sum())
print(f"{changed} of {len(before)} values of a norm changed, by up to {(after - before).abs().max():.4f}")
sys.exit(changed == 0 or not torch.equal(after, rounded))
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llmcompressor==0.14.0.1 torch==2.13.0
"$folder/venv/bin/python" "$folder/show.py" 2>/dev/null
