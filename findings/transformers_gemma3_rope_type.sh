#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: "type" of rope_scaling counts for a Llama and not for a Gemma 3.
#
# Expected: {"type": "linear", "factor": 8}, the older spelling of {"rope_type": "linear", "factor": 8}, means the same
#   for every model, as it does for a Llama in both releases.
# Seen: for a Gemma 3, 4.57.6 raises KeyError, and 5.24.0 computes without scaling: it takes rope_type "default" and
#   logs that the key "factor" is unrecognized.
# Matters for: converters, which must refuse such a folder or read it as the release that made it did.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=2,
             num_key_value_heads=1, head_dim=16, max_position_embeddings=256)


def logits(config_class, model_class, **scaling):
    torch.manual_seed(0)
    model = model_class(config_class.from_dict(SIZES | scaling)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter))
        return model(torch.arange(1, 33)[None]).logits


for name, classes in {"Llama": (LlamaConfig, LlamaForCausalLM), "Gemma 3": (Gemma3TextConfig, Gemma3ForCausalLM)}.items():
    for key in ("rope_type", "type"):
        try:
            scaled = logits(*classes, rope_scaling={key: "linear", "factor": 8.0})
            effect = "ignored" if torch.equal(scaled, logits(*classes)) else "applied"
        except KeyError:
            effect = "refused"
        print(f"{name} {key} {effect}", end="; ")
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" numpy==2.2.6
  "$folder/$1/bin/python" "$folder/show.py" 2>/dev/null
}

before=$(show 4.57.6)
after=$(show 5.24.0)
printf 'transformers 4.57.6: %s\ntransformers 5.24.0: %s\n' "$before" "$after"
others="Llama rope_type applied; Llama type applied; Gemma 3 rope_type applied;"
[ "$before" = "$others Gemma 3 type refused; " ] && [ "$after" = "$others Gemma 3 type ignored; " ]
