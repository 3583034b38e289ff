#!/usr/bin/env bash
# transformers 4.57.6: a Nemotron computes without the rope_scaling of its config.json.
#
# Expected: a key that the class NemotronConfig keeps, and other models obey, has an effect or is refused.
# Seen: 4.57.6 gives the same logits with and without a linear factor of 8, to the bit and with no warning.
#   5.24.0 applies the factor.
# Matters for: comparisons with the original, which depend on the release of transformers that computes it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from transformers import NemotronConfig, NemotronForCausalLM

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=256)


def logits(**scaling):
    torch.manual_seed(0)
    model = NemotronForCausalLM(NemotronConfig.from_dict(SIZES | scaling)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter))
        return model(torch.arange(1, 33)[None]).logits


scaled = logits(rope_scaling={"rope_type": "linear", "factor": 8.0})
print("ignored" if torch.equal(scaled, logits()) else "applied")
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
[ "$before" = ignored ] && [ "$after" = applied ]
