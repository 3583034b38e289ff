#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: one release keeps swiglu_limit of a gpt-oss, the other computes with it.
#
# Expected: swiglu_limit in config.json, 7.0 in the published models, bounds the gate and the product of each expert,
#   as it does in vLLM and in the models' own code.
# Seen: 4.57.6 keeps the key and writes it again, but its experts always use 7.0: logits with a limit of 0.01 are the
#   same to the bit. 5.24.0 reads it. The same holds for swiglu_alpha, 1.702 by default.
# Matters for: a model trained with another limit, such as Megatron's activation_func_clamp_value: all tensors and
#   settings arrive in the folder, and the release that opens it decides what is computed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from transformers import GptOssConfig, GptOssForCausalLM


def logits(**changed):
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_local_experts=2, num_experts_per_tok=1, **changed,
    )
    model = GptOssForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    key, value = next(iter(changed.items()))
    assert getattr(model.config, key) == value
    return model(torch.arange(8)[None]).logits


for key, usual, other in (("swiglu_limit", 7.0, 0.01), ("swiglu_alpha", 1.702, 1.0)):
    same = torch.equal(logits(**{key: usual}), logits(**{key: other}))
    print(f"{key} {usual} and {other}:", "same logits" if same else "other logits")
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" numpy==2.2.6
  "$folder/$1/bin/python" "$folder/show.py" 2>/dev/null
}

same=$'swiglu_limit 7.0 and 0.01: same logits\nswiglu_alpha 1.702 and 1.0: same logits'
for release in 4.57.6 5.24.0; do
  seen=$(show "$release")
  printf 'transformers %s:\n%s\n' "$release" "$seen"
  case $release in
    4.*) [ "$seen" = "$same" ] ;;
    *) [ "$seen" = "${same//same/other}" ] ;;
  esac
done
