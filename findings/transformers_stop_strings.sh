#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: a stop string that begins in the prompt ends the answer at its first token.
#
# Expected: stop_strings ends an answer that contains one of the strings; the prompt is not part of the answer. Thus vLLM and
#   OpenAI's endpoint read `stop`, and thus generate itself treats a string that is whole in the prompt.
# Seen: the end of the prompt and the beginning of the answer are searched together: after a prompt that ends in a line
#   break, as chat templates' do, an answer that begins with one has made the stop string of two, and the generation ends.
# Matters for: comparisons of engines, and tasks with stop strings such as "\n\n": a model that begins with a line break
#   answers nothing here and everything elsewhere.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast

backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
ANSWER = tokenizer.encode("\nbc")
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
    max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=255)).eval()


class Say(LogitsProcessor):
    """Makes the model answer a line break, "b" and "c"."""

    def __init__(self, begin):
        self.begin = begin

    def __call__(self, ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, ANSWER[ids.shape[1] - self.begin]] = 0
        return forced


for prompt in ("QA", "QA\n", "Q\n\nA"):
    ids = torch.tensor([tokenizer.encode(prompt)])
    result = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, stop_strings=["\n\n"],
        tokenizer=tokenizer, logits_processor=[Say(ids.shape[1])])
    print(f"after {prompt!r}: {tokenizer.decode(result[0, ids.shape[1]:])!r}")
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
printf 'Answers of a model that says "\\nbc", with stop_strings ["\\n\\n"], with transformers 4.57.6 and 5.24.0\n%s\n' "$after"
diff <(printf '%s\n' "$before") <(printf '%s\n' "$after")
diff - <(printf '%s\n' "$after") <<'SEEN'
after 'QA': '\nbc'
after 'QA\n': '\n'
after 'Q\n\nA': '\nbc'
SEEN
