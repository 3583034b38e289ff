#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: a Llama whose config.json states sliding_window forgets tokens while it generates.
#
# Expected: a Llama's attention has no window, and LlamaConfig has no sliding_window: a file that states one is loaded
#   with the same logits. What a cache gives token by token is what one pass over the whole text gives.
# Seen: one pass has the same logits with and without the setting. The cache of every model looks for it, and keeps the
#   last tokens alone: token by token the logits are off by as much as the largest is high. So are those of other types
#   without a window, such as Granite; attention_chunk_size does the same.
# Matters for: models made from Mistral's settings, and every comparison of logits that does not generate.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 53, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}


def logits(kind, config, **settings):
    torch.manual_seed(0)
    model = kind(config(**SIZES, **settings)).eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        whole, steps, cache = model(ids).logits, [], None
        for token in range(20):
            out = model(ids[:, token : token + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    return whole, torch.cat(steps, 1)


for kind, config in ((LlamaForCausalLM, LlamaConfig), (GraniteForCausalLM, GraniteConfig)):
    plain, plain_steps = logits(kind, config)
    stated, stated_steps = logits(kind, config, sliding_window=5)
    far = (stated_steps - stated).abs().max() > 0.1 * stated.abs().max()
    close = torch.allclose(plain, plain_steps, atol=1e-5)
    print(kind.__name__, "whole:", "same" if torch.equal(plain, stated) else "other", end=" ")
    print("by token:", "same" if close else "other", "with sliding_window:", "other" if far else "same")
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" numpy==2.2.6
  "$folder/$1/bin/python" "$folder/show.py" 2>/dev/null
}

seen_of="whole: same by token: same with sliding_window: other"
expected="LlamaForCausalLM $seen_of"$'\n'"GraniteForCausalLM $seen_of"
for release in 4.57.6 5.24.0; do
  seen=$(show "$release")
  printf 'transformers %s:\n%s\n' "$release" "$seen"
  [ "$seen" = "$expected" ]
done
