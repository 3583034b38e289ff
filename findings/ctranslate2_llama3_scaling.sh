#!/usr/bin/env bash
# CTranslate2 4.8.5, transformers 5.24.0: a converted Llama 3.1 computes without its rotary scaling.
#
# Expected: the converter, which has a case for type llama3 and refuses the types that it does not know, writes what the
#   runtime needs, and both give the same logits.
# Seen: it writes the type and both frequency factors, and stores `factor` for type linear alone. The runtime scales by its
#   default of 1: whatever the folder says, the logits are those of the model without rope_scaling. Nothing is logged.
# Matters for: every Llama 3.1, 3.2 and 3.3 in CTranslate2: answers to short prompts are nearly right, which hides that
#   the context beyond the original 8192 tokens was never extended.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import sys

import ctranslate2
import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

vocabulary = Tokenizer(models.WordLevel({f"token{number}": number for number in range(64)}, unk_token="token0"))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=vocabulary, unk_token="token0", bos_token="token1", eos_token="token1", pad_token="token0")
ids = torch.arange(1, 33)[None]
types = {
    "default": {},
    "linear": {"factor": 8.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}


@torch.no_grad()
def logits(model):
    return model(ids).logits.numpy()


for kind, settings in types.items():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=1, initializer_range=0.2,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **settings})).eval()
    expected = logits(model)
    source, target = f"{sys.argv[1]}/{kind}", f"{sys.argv[1]}/{kind}-ct2"
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    ctranslate2.converters.TransformersConverter(source).convert(target)
    batch = ctranslate2.StorageView.from_array(ids.numpy().astype(np.int32))
    length = ctranslate2.StorageView.from_array(np.array([32], dtype=np.int32))
    converted = np.array(ctranslate2.Generator(target, device="cpu").forward_batch(batch, length))
    print(f"{kind}: converted as the folder says:", np.allclose(converted, expected, rtol=1e-3, atol=1e-3))
    if kind == "default":
        unscaled = expected
    if kind == "llama3":
        print("llama3: converted as without scaling:", np.allclose(converted, unscaled, rtol=1e-3, atol=1e-3))
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 ctranslate2==4.8.5 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder" 2>/dev/null)
printf 'CTranslate2 4.8.5:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
default: converted as the folder says: True
linear: converted as the folder says: True
llama3: converted as the folder says: False
llama3: converted as without scaling: True
SEEN
