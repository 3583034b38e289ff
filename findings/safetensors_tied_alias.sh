#!/usr/bin/env bash
# safetensors 0.8.0 with transformers 4.57.6 and 5.24.0: a tied model that save_model wrote comes back without a table.
#
# Expected: safetensors.torch.save_model, the documented way for models that share tensors, keeps one name of a tied
#   table and an alias of the other in the file's metadata; from_pretrained of the folder restores both.
# Seen: it keeps lm_head.weight, as the first by name. transformers 5.24.0 restores the table. 4.57.6 returns a model
#   whose embedding has no values (it stays on the meta device), with no error; the first forward pass raises.
# Matters for: readers of such folders, which must follow the alias rather than expect the embedding's own name.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
model = LlamaForCausalLM(config)
folder = Path(tempfile.mkdtemp())
config.save_pretrained(folder)
save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
with safe_open(folder / "model.safetensors", "pt") as file:
    kept = [name for name in file.keys() if name in ("lm_head.weight", "model.embed_tokens.weight")]
table = LlamaForCausalLM.from_pretrained(folder).model.embed_tokens.weight
restored = table.device.type != "meta" and torch.equal(table, model.model.embed_tokens.weight)
print(f"keeps {', '.join(kept)};", "table restored" if restored else f"table on device {table.device}")
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" safetensors==0.8.0 numpy==2.2.6
  "$folder/$1/bin/python" "$folder/show.py" 2>/dev/null
}

before=$(show 4.57.6)
after=$(show 5.24.0)
printf 'transformers 4.57.6: %s\ntransformers 5.24.0: %s\n' "$before" "$after"
[ "$before" = "keeps lm_head.weight; table on device meta" ] && [ "$after" = "keeps lm_head.weight; table restored" ]
