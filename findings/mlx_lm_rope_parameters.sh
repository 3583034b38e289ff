#!/usr/bin/env bash
# mlx-lm 0.32.2, transformers 5.24.0: a Llama that transformers 5 has saved has another base and no scaling in mlx-lm.
#
# Expected: mlx_lm gives the logits of the folder, or refuses it, as it does a Qwen3's without "rope_theta".
# Seen: transformers 5 writes the base and the scaling of rotary positions as rope_parameters alone; mlx-lm 0.32.2 reads
#   rope_theta and rope_scaling, which are then missing, and takes 10,000 and none. Nothing is said. With both keys added
#   to config.json the logits are those of transformers. Qwen2, Gemma 2, OLMo 2, Mixtral and others do the same.
# Matters for: fine-tunes saved by transformers 5 that are converted, quantised or trained further by mlx-lm: every position
#   is turned by other angles, and a Llama 3 with a base of 500,000 only seems to have learned badly.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json
import pathlib
import sys

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from transformers import LlamaConfig, LlamaForCausalLM

mx.set_default_device(mx.cpu)
ids = torch.arange(1, 33)[None]
cases = {
    "base 10000": {"rope_type": "default", "rope_theta": 10000.0},
    "base 500000": {"rope_type": "default", "rope_theta": 500000.0},
    "as in Llama 3.1": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
for label, rotary in cases.items():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, rope_parameters=rotary)).eval()
    with torch.no_grad():
        expected = model(ids).logits.numpy()
    folder = pathlib.Path(sys.argv[1]) / label
    model.save_pretrained(folder)
    path = folder / "config.json"
    for spelling in ("as saved", "with older keys"):
        settings = json.loads(path.read_text())
        if spelling == "with older keys":
            settings["rope_theta"] = rotary["rope_theta"]
            settings["rope_scaling"] = rotary
            path.write_text(json.dumps(settings))
        loaded, _ = load_model(folder)
        same = np.allclose(np.array(loaded(mx.array(ids.numpy()))), expected, rtol=1e-3, atol=1e-3)
        print(f"{label}, {spelling}: {'same' if same else 'other'} logits")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  transformers==5.24.0 mlx-lm==0.32.2 "mlx[cpu]==0.32.4" numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder" 2>/dev/null)
printf 'mlx-lm 0.32.2, transformers 5.24.0:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
base 10000, as saved: same logits
base 10000, with older keys: same logits
base 500000, as saved: other logits
base 500000, with older keys: same logits
as in Llama 3.1, as saved: other logits
as in Llama 3.1, with older keys: same logits
SEEN
