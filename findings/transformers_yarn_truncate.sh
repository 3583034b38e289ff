#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: `truncate` of YaRN is passed over in a Gemma 3 by the newer release alone.
#
# Expected: "truncate": false in the YaRN settings of a model's layers leaves the bounds of the correction unrounded,
#   as in a model whose layers share one rotary embedding.
# Seen: 4.57.6 applies it to the layers with full attention. 5.24.0 has settings for each kind of layer and looks for
#   this one next to the kinds, so it rounds, as by default; a Llama with the same settings is not rounded by either.
# Matters for: a Gemma 3 with a longer context by YaRN: a third of its frequencies differ between the releases,
#   with no word about it. A converter cannot state the setting so that both read it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import transformers
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

apart = transformers.__version__.startswith("5.")


def frequencies(kind, truncate):
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "truncate": truncate}
    if kind == "Llama":
        settings = {"rope_parameters": yarn | {"rope_theta": 1e6}} if apart else {"rope_theta": 1e6, "rope_scaling": yarn}
        return LlamaRotaryEmbedding(LlamaConfig(hidden_size=512, num_attention_heads=8, **settings)).inv_freq
    if apart:
        window = {"rope_type": "default", "rope_theta": 1e4}
        settings = {"rope_parameters": {"full_attention": yarn | {"rope_theta": 1e6}, "sliding_attention": window}}
    else:
        settings = {"rope_theta": 1e6, "rope_scaling": yarn}
    rotary = Gemma3RotaryEmbedding(Gemma3TextConfig(head_dim=64, num_hidden_layers=6, **settings))
    return rotary.full_attention_inv_freq if apart else rotary.inv_freq


for kind in ("Llama", "Gemma 3"):
    changed = frequencies(kind, True) != frequencies(kind, False)
    print(f"{kind} {int(changed.sum())} of {len(changed)}", end=", " if kind == "Llama" else "\n")
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" numpy==2.2.6
  "$folder/$1/bin/python" "$folder/show.py" 2>/dev/null
}

before=$(show 4.57.6)
after=$(show 5.24.0)
printf 'Frequencies that "truncate" changes\ntransformers 4.57.6: %s\ntransformers 5.24.0: %s\n' "$before" "$after"
[ "$before" = "Llama 9 of 32, Gemma 3 9 of 32" ] && [ "$after" = "Llama 9 of 32, Gemma 3 0 of 32" ]
