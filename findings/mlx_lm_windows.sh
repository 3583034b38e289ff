#!/usr/bin/env bash
# mlx-lm 0.32.2, transformers 5.24.0: a Gemma 2, Mistral or StarCoder2 has no window, and a GLM-4 turns all its channels.
#
# Expected: mlx_lm computes with sliding_window, as it does for a Gemma 3, and with partial_rotary_factor, as for a Phi, or
#   refuses a folder that states them.
# Seen: keys for which a model's class has no field are dropped from config.json. Published Gemma 2, Mistral 7B v0.1 and
#   StarCoder2 have a window of 4096 tokens, GLM-4-9B turns half of each head's channels: the logits are those without
#   a window, and those with all channels turned. Nothing is said.
# Matters for: evaluation and training with long texts, where the first three differ from the 4097th token on; a GLM-4
#   differs from the first.
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
from transformers import AutoConfig, AutoModelForCausalLM

mx.set_default_device(mx.cpu)
ids = torch.arange(1, 33)[None]


def logits(kind, **settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=1, pad_token_id=0,
        initializer_range=0.2, **settings), attn_implementation="eager").eval()
    with torch.no_grad():
        return model, model(ids).logits.numpy()


def rotary(factor):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}}


cases = {
    "gemma2": ({"sliding_window": 8}, {"sliding_window": 64}),
    "mistral": ({"sliding_window": 8}, {"sliding_window": 64}),
    "starcoder2": ({"sliding_window": 8, "norm_epsilon": 1e-5}, {"sliding_window": 64}),
    "glm": (rotary(0.5), rotary(1.0)),
}
for kind, (stated, passed_over) in cases.items():
    folder = pathlib.Path(sys.argv[1]) / kind
    model, expected = logits(kind, **stated)
    without = logits(kind, **passed_over)[1]
    model.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings.update(settings["rope_parameters"])  # the keys that mlx-lm reads
    (folder / "config.json").write_text(json.dumps(settings))
    loaded = np.array(load_model(folder)[0](mx.array(ids.numpy())))
    print(f"{kind}: as the folder says {np.allclose(loaded, expected, rtol=1e-2, atol=1e-2)},",
          f"as without {np.allclose(loaded, without, rtol=1e-2, atol=1e-2)}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  transformers==5.24.0 mlx-lm==0.32.2 "mlx[cpu]==0.32.4" numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder" 2>/dev/null)
printf 'mlx-lm 0.32.2:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
gemma2: as the folder says False, as without True
mistral: as the folder says False, as without True
starcoder2: as the folder says False, as without True
glm: as the folder says False, as without True
SEEN
