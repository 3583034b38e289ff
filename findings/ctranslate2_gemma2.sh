#!/usr/bin/env bash
# CTranslate2 4.8.5, transformers 5.24.0: a converted Gemma 2 has neither a window nor limits of its logits.
#
# Expected: the converter, which has a loader for Gemma 2 of its own and applies a Gemma 3's window, writes all that the model
#   computes with, or refuses it.
# Seen: sliding_window, attn_logit_softcapping and final_logit_softcapping, which all published Gemma 2 have, are passed
#   over without a word: the logits of every folder are those of a model in which the three are switched off.
# Matters for: log probabilities and sampling, since the last limit bends all logits; answers change with the limit of
#   attention, and with the window from 4097 tokens on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import sys

import ctranslate2
import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast

vocabulary = Tokenizer(models.WordLevel({f"token{number}": number for number in range(64)}, unk_token="token0"))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=vocabulary, unk_token="token0", bos_token="token1", eos_token="token1", pad_token="token0")
ids = torch.arange(1, 33)[None]
cases = {
    "none of the three": {},
    "window of 8 tokens": {"sliding_window": 8},
    "limit of attention": {"attn_logit_softcapping": 0.5},
    "limit of logits": {"final_logit_softcapping": 5.0},
}
for label, settings in cases.items():
    torch.manual_seed(0)
    off = {"sliding_window": 64, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    model = Gemma2ForCausalLM._from_config(Gemma2Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, bos_token_id=1, eos_token_id=1, pad_token_id=0,
        query_pre_attn_scalar=16, initializer_range=0.3, **{**off, **settings}), attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(ids).logits.numpy()
    source, target = f"{sys.argv[1]}/{label}", f"{sys.argv[1]}/{label} converted"
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    ctranslate2.converters.TransformersConverter(source).convert(target)
    batch = ctranslate2.StorageView.from_array(ids.numpy().astype(np.int32))
    length = ctranslate2.StorageView.from_array(np.array([32], dtype=np.int32))
    converted = np.array(ctranslate2.Generator(target, device="cpu").forward_batch(batch, length))
    if not settings:
        off_everywhere = expected
    print(f"{label}: as the folder says {np.allclose(converted, expected, rtol=1e-3, atol=1e-3)},",
          f"as without {np.allclose(converted, off_everywhere, rtol=1e-3, atol=1e-3)}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 ctranslate2==4.8.5 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder" 2>/dev/null)
printf 'CTranslate2 4.8.5:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
none of the three: as the folder says True, as without True
window of 8 tokens: as the folder says False, as without True
limit of attention: as the folder says False, as without True
limit of logits: as the folder says False, as without True
SEEN
