#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: of two bases of rotary positions in one config.json each takes another one.
#
# Expected: "rope_theta" next to "rope_parameters" with a "rope_theta" of another value is refused, or means the same in
#   both releases; a folder that 5.24.0 saved gives the same answers in 4.57.6, or is refused.
# Seen: 4.57.6 takes the first, 5.24.0 the second, neither with a warning. With "rope_parameters" alone, as 5.24.0 saves
#   it, 4.57.6 computes with its default of 10000.
# Matters for: folders that pass through several tools, and fine-tuning with a changed base: both spellings must agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                             num_attention_heads=2)).save_pretrained(folder)
spelled = ("rope_theta", "rope_scaling", "rope_parameters")
table = {key: value for key, value in json.loads((folder / "config.json").read_text()).items() if key not in spelled}
before, since = {"rope_theta": 500.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0}}
for settings in (before, since, before | since):
    (folder / "config.json").write_text(json.dumps(table | settings))
    frequencies = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
    print(round(float(frequencies[1]) ** -4), end=" ")  # of heads of 8 dimensions
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" numpy==2.2.6
  "$folder/$1/bin/python" "$folder/show.py" "$folder/model-$1" 2>/dev/null
}

before=$(show 4.57.6)
after=$(show 5.24.0)
printf 'bases with rope_theta 500, with 900 in rope_parameters, and with both\n'
printf 'transformers 4.57.6: %s\ntransformers 5.24.0: %s\n' "$before" "$after"
[ "$before" = "500 10000 500 " ] && [ "$after" = "500 900 900 " ]
