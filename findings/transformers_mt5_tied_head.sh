#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: the logits of an mT5 with a tied head differ by a factor of sqrt(d_model).
#
# Expected: a folder with tie_word_embeddings = true gives the same logits in both releases, as that of a T5 does.
# Seen: 4.57.6 divides the logits of T5 and mT5 by sqrt(d_model) where the head is tied, 5.24.0 those of T5 alone.
# Matters for: log probabilities and sampling, which change; greedy answers do not, so that nothing seems wrong.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from transformers import MT5Config, MT5ForConditionalGeneration, T5Config, T5ForConditionalGeneration

SIZES = dict(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
ids = torch.tensor([[3, 4, 5]])
for config_class, model_class in ((T5Config, T5ForConditionalGeneration), (MT5Config, MT5ForConditionalGeneration)):
    model = model_class(config_class(**SIZES, tie_word_embeddings=True)).eval()
    with torch.no_grad():
        out = model(ids, decoder_input_ids=ids, output_hidden_states=True)
        whole = out.decoder_hidden_states[-1] @ model.shared.weight.T
    print(round(float((out.logits / whole).median()), 4), end=" ")
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" numpy==2.2.6
  "$folder/$1/bin/python" "$folder/show.py" 2>/dev/null
}

before=$(show 4.57.6)
after=$(show 5.24.0)
printf 'logits by those of the whole embedding, T5 and mT5 with d_model = 16\n'
printf 'transformers 4.57.6: %s\ntransformers 5.24.0: %s\n' "$before" "$after"
[ "$before" = "0.25 0.25 " ] && [ "$after" = "0.25 1.0 " ]
