#!/usr/bin/env bash
# torchtitan 0.3.0: the bias by which a Qwen3 mixture chooses its experts is trained, and left out of the folder.
#
# Expected: to_hf of the model's adapter gives every tensor that the forward pass uses, or refuses.
# Seen: load_balance_coeff is 0.001 by default; each optimizer step moves moe.expert_bias_E, and the router adds it to the
#   scores before it takes the best. Qwen3-MoE of Hugging Face has no such tensor: to_hf leaves it out without a word
#   (DeepSeek-V3's adapter has a name for it), and the folder's model sends tokens to other experts.
# Matters for: mixtures that are trained by torchtitan and served by another engine: all shapes fit, and the answers are
#   another model's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from torchtitan.models.qwen3 import Qwen3StateDictAdapter, qwen3_configs

torch.manual_seed(0)
config = qwen3_configs["debugmodel_moe"](attn_backend="varlen")
model = config.build()
state = model.state_dict()
bias = state["layers.0.moe.expert_bias_E"]
router = model.layers["0"].moe.router
torch.nn.init.normal_(router.gate.weight)
x = torch.randn(1, 4, config.dim)


def experts(bias):
    return [sorted(row) for row in router(x, bias)[1][0].tolist()]


moved = torch.zeros_like(bias)
moved[0] = 2.0
print("in the state:", tuple(bias.shape))
print("experts chosen with it:", "the same" if experts(moved) == experts(torch.zeros_like(bias)) else "others")
print("in the Hugging Face folder:", [name for name in Qwen3StateDictAdapter(config, None).to_hf(state) if "bias" in name])
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torchtitan==0.3.0 triton==3.9.0 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" 2>/dev/null)
printf 'torchtitan 0.3.0:\n%s\n' "$seen"
[ "$seen" = 'in the state: (64,)
experts chosen with it: others
in the Hugging Face folder: []' ]
