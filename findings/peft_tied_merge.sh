#!/usr/bin/env bash
# PEFT 0.21.2: merging a LoRA of a tied embedding adds it twice, also with the option that ties the adapters.
#
# Expected: with ensure_weight_tying=True the adapters of the embedding and of the head are one, as are their weights, and
#   merge_and_unload gives a model with the logits of the adapted one.
# Seen: training and reloading are right. merge_and_unload visits both modules and adds the same product to the one matrix
#   that they share: W + 2BA. It warns that tied modules "can lead to complications", with the advice to untie the model
#   before, which is what the option should spare; the merge goes ahead.
# Matters for: models with a tied head, for which the option was made: the merged folder, its conversions and its quantised
#   forms answer otherwise than the adapter that was evaluated.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
ids = torch.arange(1, 25)[None]
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True)).eval()
table = model.model.embed_tokens.weight.detach().clone()
settings = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["embed_tokens"], ensure_weight_tying=True)
model = get_peft_model(model, settings)
embedding, head = model.base_model.model.model.embed_tokens, model.base_model.model.lm_head
with torch.no_grad():
    for name in ("A", "B"):
        torch.nn.init.normal_(getattr(embedding, f"lora_embedding_{name}")["default"])
    product = embedding.get_delta_weight("default")
    print("one adapter for both:", torch.equal(product, head.get_delta_weight("default")))
    adapted = model(ids).logits
    merged = model.merge_and_unload()
    print("merged logits are the adapted ones:", torch.allclose(merged(ids).logits, adapted, rtol=1e-3, atol=1e-3))
    for times in (1, 2):
        same = torch.allclose(merged.model.embed_tokens.weight, table + times * product, atol=1e-5)
        print(f"merged table is W + {times}BA:", same)
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 peft==0.21.2 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" 2>/dev/null)
printf 'PEFT 0.21.2:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
one adapter for both: True
merged logits are the adapted ones: False
merged table is W + 1BA: False
merged table is W + 2BA: True
SEEN
