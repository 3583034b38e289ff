#!/usr/bin/env bash
# transformers 5.24.0: an MPT computes with ALiBi, four times the width and no biases, whatever its configuration says.
#
# Expected: attn_config.alibi = false, attn_config.qk_ln = true, expansion_ratio, no_bias = false, learned_pos_emb and
#   logit_scale of an MptConfig, which llm-foundry trains with and writes into config.json, change the model, or are refused.
# Seen: all are taken without a word, kept in config.json, and change neither the parameters nor the logits.
# Matters for: an MPT that llm-foundry has trained with another of these: from_pretrained reports missing or unexpected
#   tensors at most; with ALiBi switched off, or logits scaled, not even that.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from transformers import MptConfig, MptForCausalLM


def made(**changed):
    torch.manual_seed(0)
    model = MptForCausalLM(MptConfig(vocab_size=32, d_model=16, n_heads=2, n_layers=2, max_seq_len=32, **changed)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model.state_dict().keys(), model(torch.arange(8)[None]).logits


names, usual = made()
for changed in (
    {"attn_config": {"alibi": False}}, {"attn_config": {"qk_ln": True}}, {"expansion_ratio": 2}, {"no_bias": False},
    {"learned_pos_emb": False}, {"logit_scale": 0.1},
):
    found, logits = made(**changed)
    print(changed, "same model" if found == names and torch.equal(logits, usual) else "another model")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" 2>/dev/null)
printf '%s\n' "$seen"
[ "$(grep -c 'same model$' <<<"$seen")" = 6 ]
