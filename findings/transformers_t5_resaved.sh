#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: a T5 v1.1 that 5.24.0 has loaded and saved gives other logits in 4.57.6.
#
# Expected: a model with a head of its own (tie_word_embeddings = false) is the same after from_pretrained and
#   save_pretrained, for every release that reads the folder.
# Seen: 5.24.0 writes tie_word_embeddings = true next to the head, and the new key scale_decoder_outputs = false. It
#   reads its own folder as before, since the stored head differs from the embedding. 4.57.6 takes the key's word: it
#   drops the stored head, uses the embedding as the head and scales the logits, without a warning.
# Matters for: fine-tuned T5, Flan-T5 and their kin that are saved by one release and served by another; a converter
#   has to look at the stored head and at both keys.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import T5Config, T5ForConditionalGeneration

action, folder = sys.argv[1], Path(sys.argv[2])
if action == "make":
    torch.manual_seed(0)
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, num_heads=2, d_ff=32, num_layers=1, num_decoder_layers=1,
                      tie_word_embeddings=False, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(folder / "made")
if action == "resave":
    T5ForConditionalGeneration.from_pretrained(folder / "made").save_pretrained(folder / "resaved")
    config = json.loads((folder / "resaved" / "config.json").read_text())
    print({key: config[key] for key in ("tie_word_embeddings", "scale_decoder_outputs")})
if action == "read":
    logits = []
    for name in ("made", "resaved"):
        model = T5ForConditionalGeneration.from_pretrained(folder / name).eval()
        with torch.no_grad():
            logits.append(model(input_ids=torch.tensor([[3, 4, 5, 1]]), decoder_input_ids=torch.tensor([[0]])).logits)
    verdict = "equal" if torch.allclose(*logits, atol=1e-4) else "other logits"
    print(f"{transformers.__version__} reads the resaved folder: {verdict}")
PY

for release in 4.57.6 5.24.0; do
  python3 -m venv "$folder/$release"
  "$folder/$release/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 "transformers==$release" numpy==2.2.6
done
run() { "$folder/$1/bin/python" "$folder/show.py" "$2" "$folder" 2>"$folder/errors" || { cat "$folder/errors"; exit 1; }; }
seen=$(run 4.57.6 make; run 5.24.0 resave; run 4.57.6 read; run 5.24.0 read)
printf '%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
{'tie_word_embeddings': True, 'scale_decoder_outputs': False}
4.57.6 reads the resaved folder: other logits
5.24.0 reads the resaved folder: equal
SEEN
