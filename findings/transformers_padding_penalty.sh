#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: a repetition penalty counts the padding of a shorter prompt, in one release and one penalty.
#
# Expected: a prompt in a batch has the answer that it has alone: left padding is hidden by the attention mask.
# Seen: 4.57.6 takes the padding for tokens that have been there. Where the end token serves as padding, as is usual for
#   models without a padding token, it is penalised in the shorter prompts of a batch from the first step. 5.24.0 leaves
#   the padding out of repetition_penalty, but encoder_repetition_penalty rewards it in both.
# Matters for: evaluations in batches: the length of an answer depends on the other prompts of its batch, and figures of the
#   two releases, or of two batch sizes, differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

END, PADDING = 2, 6
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, initializer_range=0.5, bos_token_id=1, eos_token_id=END)).eval()
short = torch.tensor([[5, 6, 7, 8]])
padded = torch.cat([torch.full((1, PADDING), END), short], 1)
mask = torch.cat([torch.zeros(1, PADDING), torch.ones(1, short.shape[1])], 1).long()


def end_score(ids, attention_mask, penalty):
    result = model.generate(
        ids, attention_mask=attention_mask, max_new_tokens=1, do_sample=False, pad_token_id=END,
        output_scores=True, return_dict_in_generate=True, **penalty)
    return result.scores[0][0, END].item()


for penalty in ({}, {"repetition_penalty": 1.3}, {"encoder_repetition_penalty": 1.3}):
    alone, batched = end_score(short, torch.ones_like(short), penalty), end_score(padded, mask, penalty)
    print(f"{penalty}: {'equal' if abs(alone - batched) < 1e-3 else f'times {batched / alone:.2f}'}")
PY

python3 -m venv "$folder/venv"
install=("$folder/venv/bin/pip" install --quiet --disable-pip-version-check)
"${install[@]}" torch==2.13.0
show() {
  "${install[@]}" "transformers==$1" numpy==2.2.6
  "$folder/venv/bin/python" "$folder/show.py" 2>"$folder/errors" || { cat "$folder/errors"; exit 1; }
}

before=$(show 4.57.6)
after=$(show 5.24.0)
printf "The end token's score with padding and without, with transformers 4.57.6:\n%s\n5.24.0:\n%s\n" "$before" "$after"
diff - <(printf '%s\n' "$before" "$after") <<'SEEN'
{}: equal
{'repetition_penalty': 1.3}: times 0.77
{'encoder_repetition_penalty': 1.3}: times 1.30
{}: equal
{'repetition_penalty': 1.3}: equal
{'encoder_repetition_penalty': 1.3}: times 1.30
SEEN
