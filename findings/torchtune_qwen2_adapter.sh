#!/usr/bin/env bash
# torchtune 0.6.1: the PEFT adapter that it writes for a Qwen2 is not the one that it trained.
#
# Expected: adapter_model.safetensors, which torchtune writes next to its own adapter_model.pt, updates a model in
#   transformers as it does in torchtune.
# Seen: tune_to_peft_adapter_weights changes the order of the rows of queries' and keys' second factors, as Llama needs,
#   whose weights torchtune keeps in another order than transformers; those of a Qwen2 it keeps as they are.
# Matters for: Qwen2 and Qwen2.5 adapters of torchtune in PEFT, vLLM and other programs, without any warning. The merged
#   model in the same folder is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from torchtune.models.convert_weights import tune_to_peft_adapter_weights
from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf

sizes = {"num_heads": 4, "num_kv_heads": 2, "dim": 32}
torch.manual_seed(0)
for projection, rows in (("q", 32), ("k", 16), ("v", 16)):
    name = f"layers.0.attn.{projection}_proj"
    matrix, first, second = torch.randn(rows, 32), torch.randn(4, 32), torch.randn(rows, 4)
    tuned = {f"{name}.weight": matrix + second @ first}
    (expected,) = qwen2_tune_to_hf(tuned, **sizes).values()
    (base,) = qwen2_tune_to_hf({f"{name}.weight": matrix}, **sizes).values()
    adapter = {f"{name}.lora_a.weight": first, f"{name}.lora_b.weight": second}
    down, up = tune_to_peft_adapter_weights(adapter, **sizes).values()
    print(f"{projection}_proj with the PEFT adapter is as trained:", torch.allclose(base + up @ down, expected))
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 torchtune==0.6.1 torchao==0.11.0
seen=$("$folder/venv/bin/python" "$folder/show.py" 2>/dev/null)
printf 'torchtune 0.6.1:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
q_proj with the PEFT adapter is as trained: False
k_proj with the PEFT adapter is as trained: False
v_proj with the PEFT adapter is as trained: True
SEEN
