#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: the length from which LongRoPE stretches positions is read by one release alone.
#
# Expected: "original_max_position_embeddings" in rope_scaling of type longrope is the length up to which the short
#   factors hold, as it is the original length of type llama3 for both releases.
# Seen: 4.57.6 passes over it and takes max_position_embeddings, unless the key stands next to rope_scaling: sequences
#   of 17 to 64 tokens have the short factors, and the scale of sine and cosine is another one. 5.24.0, which writes the
#   key inside, reads it there. Neither says a word.
# Matters for: folders that 5.24.0 saved and 4.57.6 reads, whose answers differ for every prompt beyond the original
#   length. The key next to rope_scaling, too, makes both read the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

scaling = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
           "original_max_position_embeddings": 16}
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                     max_position_embeddings=64, rope_scaling=scaling)
rotary = LlamaForCausalLM(config).model.rotary_emb
for length in (16, 24, 65):
    rotary(torch.zeros(1, length, 16), torch.arange(length)[None])
    print(f"{length} tokens: factor {1 / float(rotary.inv_freq[0]):g}", end=", ")
print(f"scale {rotary.attention_scaling:.4f}")
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" numpy==2.2.6
  "$folder/$1/bin/python" "$folder/show.py" 2>/dev/null
}

before=$(show 4.57.6)
after=$(show 5.24.0)
printf 'Original length 16, limit 64, short factor 1, long factor 4\n'
printf 'transformers 4.57.6: %s\ntransformers 5.24.0: %s\n' "$before" "$after"
[ "$before" = "16 tokens: factor 1, 24 tokens: factor 1, 65 tokens: factor 4, scale 1.1547" ] &&
  [ "$after" = "16 tokens: factor 1, 24 tokens: factor 4, 65 tokens: factor 4, scale 1.2247" ]
