#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: in beam search a repetition penalty leaves out the tokens that the model is sure of.
#
# Expected: repetition_penalty makes each token that has been there less probable, with beams as without.
# Seen: without beams it divides the logit, where it is positive. With num_beams it multiplies the logarithm of the
#   probability, which is next to 0 for a token with a probability of 0.99, and so is the product. A model that would
#   repeat one token for ever leaves the loop with a penalty of 1.5; with two beams it stays there with one of 100.
# Matters for: settings that are carried over from sampling to beams or compared between them, and other engines: those
#   that penalise logits in both, as FasterTransformer does, give other answers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
tokens = 16
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=tokens, hidden_size=tokens, intermediate_size=tokens, num_hidden_layers=1, num_attention_heads=1,
    eos_token_id=None, bos_token_id=None, pad_token_id=0)).eval()
# Each token is the model's choice after itself: its embedding is a unit vector, and the layer adds nothing.
with torch.no_grad():
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.model.layers[0].mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(tokens))
    model.lm_head.weight.fill_(10)
    model.lm_head.weight.add_(2 * torch.eye(tokens))
    model.lm_head.weight.add_(torch.arange(tokens)[:, None] / 100)
prompt = torch.tensor([[5]])
print(f"probability of the same token: {model(prompt).logits[0, -1].softmax(-1)[5]:.3f}")
for beams, penalty in ((1, 1.0), (1, 1.5), (2, 1.0), (2, 1.5), (2, 100.0)):
    ids = model.generate(prompt, num_beams=beams, repetition_penalty=penalty, max_new_tokens=6, do_sample=False)
    print(f"num_beams {beams}, repetition_penalty {penalty}: {ids[0].tolist()}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0

show() {
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" numpy==2.2.6
  "$folder/venv/bin/python" "$folder/show.py" 2>/dev/null
}

before=$(show 4.57.6)
after=$(show 5.24.0)
printf 'Answers of transformers 4.57.6 and 5.24.0\n%s\n' "$after"
diff <(printf '%s\n' "$before") <(printf '%s\n' "$after")
diff - <(printf '%s\n' "$after") <<'SEEN'
probability of the same token: 0.994
num_beams 1, repetition_penalty 1.0: [5, 5, 5, 5, 5, 5, 5]
num_beams 1, repetition_penalty 1.5: [5, 15, 14, 13, 12, 11, 10]
num_beams 2, repetition_penalty 1.0: [5, 5, 5, 5, 5, 5, 5]
num_beams 2, repetition_penalty 1.5: [5, 5, 5, 5, 5, 5, 5]
num_beams 2, repetition_penalty 100.0: [5, 5, 5, 5, 5, 5, 5]
SEEN
