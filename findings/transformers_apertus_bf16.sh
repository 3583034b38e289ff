#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: the activation of Apertus is computed with other numbers by the two releases.
#
# Expected: a model that is loaded with `dtype=torch.float32` has the numbers of its file, in fp32.
# Seen: 4.57 makes the two learned numbers of xIELU in bf16, whatever type is asked for, and rounds those of the file to
#   it: 0.8001 becomes 0.8008. 5.24 keeps them. The same folder gives other logits, without a message.
# Matters for: comparisons with an original, and merges or conversions by 4.57, which write the rounded numbers back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/make.py" <<'PY'
import sys

import torch
from transformers import ApertusConfig, ApertusForCausalLM

sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
config = ApertusConfig(**sizes, **ids, num_attention_heads=2, num_key_value_heads=2)
model = ApertusForCausalLM(config).to(torch.float32)
model.model.layers[0].mlp.act_fn.alpha_p.data.fill_(0.8001)
model.save_pretrained(sys.argv[1])
PY
cat >"$folder/show.py" <<'PY'
import sys

import torch
from transformers import ApertusForCausalLM, __version__

model = ApertusForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
number = model.model.layers[0].mlp.act_fn.alpha_p
others = {each.dtype for name, each in model.named_parameters() if "act_fn" not in name}
print(__version__, number.dtype, f"{number.item():.4f}", *others)
PY

for release in 4.57.6 5.24.0; do
  python3 -m venv "$folder/$release"
  "$folder/$release/bin/pip" install --quiet --disable-pip-version-check "transformers==$release" torch==2.13.0
done
"$folder/5.24.0/bin/python" "$folder/make.py" "$folder/model" >"$folder/log" 2>&1
seen=$(for release in 4.57.6 5.24.0; do "$folder/$release/bin/python" "$folder/show.py" "$folder/model" 2>>"$folder/log"; done)
printf '%s\n' "$seen"
[ "$seen" = $'4.57.6 torch.bfloat16 0.8008 torch.float32\n5.24.0 torch.float32 0.8001 torch.float32' ]
