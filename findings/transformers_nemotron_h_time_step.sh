#!/usr/bin/env bash
# transformers 5.24.0: Nemotron-H computes a token otherwise in a prompt than as a new token.
#
# Expected: the logits of a text are the same whether it comes as one prompt or token by token, up to rounding.
# Seen: time_step_min of config.json, 0.001 by default, bounds a Mamba layer's time steps in a prompt alone; steps of one
#   token are not bounded. Where softplus(dt + dt_bias) is smaller, as with a dt_bias of -9, logits of a tiny model differ
#   by a seventh of the largest. With a time_step_min of 1e-30 they are the same.
# Matters for: checkpoints of programs that bound nothing, such as megatron-core's: prompts are computed otherwise than
#   they were trained, and a comparison by generated tokens does not see it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

IDS = torch.arange(1, 9)[None]


def largest_difference(time_step_min):
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=32, hidden_size=16, layers_block_type=["mamba", "attention"],
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, mamba_num_heads=2, mamba_head_dim=16,
        n_groups=1, ssm_state_size=16, chunk_size=4, time_step_min=time_step_min,
    )
    model = NemotronHForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            torch.nn.init.constant_(parameter, -9.0)  # softplus(-9) is 0.00012
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter)
    whole = model(IDS).logits[0]
    cache, steps = None, []
    for token in IDS[0]:
        out = model(token[None, None], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits[0, 0])
    return ((torch.stack(steps) - whole).abs().max() / whole.abs().max()).item()


with torch.no_grad():
    for least in (0.001, 1e-30):
        print(f"time_step_min {least}:", "as one prompt" if largest_difference(least) < 1e-4 else "other logits")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" 2>/dev/null)
printf 'transformers 5.24.0:\n%s\n' "$seen"
[ "$seen" = $'time_step_min 0.001: other logits\ntime_step_min 1e-30: as one prompt' ]
