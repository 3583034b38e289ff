#!/usr/bin/env bash
# mistral-common 1.13.1: with each new question the system prompt moves to it, and no earlier token stays in its place.
#
# Expected: a conversation grows at its end: the prompt of the second question begins with the first prompt and its answer,
#   as in other chat formats, so that a server keeps what it has computed of them.
# Seen: the formats v2 and v3, of Mistral 7B v0.3, Mixtral 8x22B and Mistral NeMo, put the system prompt into the last question.
#   Each question takes it away from the one before: the prompts have only "<s>[INST]" in common. v1 has it in the first
#   question and v7 in a place of its own; without a system prompt v2 and v3 grow at the end, too.
# Matters for: prefix caches and sessions, which find nothing to keep exactly where there is a long system prompt, and
#   templates in the manner of v1, which give these models a conversation that they were not trained on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
from os.path import commonprefix

from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

formats = {
    "v1": MistralTokenizer.v1(),
    "v2": MistralTokenizer.v2(),
    "v3": MistralTokenizer.v3(),
    "v3, tekken": MistralTokenizer.v3(is_tekken=True),
    "v7": MistralTokenizer.v7(),
}
system = [SystemMessage(content="You answer in rhymes.")]
first = [UserMessage(content="What is a sonnet?")]
second = [AssistantMessage(content="Fourteen lines."), UserMessage(content="And a limerick?")]


def prompt(tokenizer, messages):
    return tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages))


for name, tokenizer in formats.items():
    for case, start in (("with", system), ("without", [])):
        before, after = (prompt(tokenizer, start + messages) for messages in (first, first + second))
        kept = len(commonprefix([before.tokens, after.tokens]))
        print(f"{name}, {case} a system prompt: {'all' if kept == len(before.tokens) else kept} of the first prompt's tokens kept")
text = prompt(formats["v3, tekken"], system + first + second).text
print(text)
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mistral-common==1.13.1 sentencepiece==0.2.3 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" 2>"$folder/errors") || { cat "$folder/errors"; exit 1; }
printf 'Two prompts of one conversation, with mistral-common 1.13.1\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
v1, with a system prompt: all of the first prompt's tokens kept
v1, without a system prompt: all of the first prompt's tokens kept
v2, with a system prompt: 2 of the first prompt's tokens kept
v2, without a system prompt: all of the first prompt's tokens kept
v3, with a system prompt: 2 of the first prompt's tokens kept
v3, without a system prompt: all of the first prompt's tokens kept
v3, tekken, with a system prompt: 2 of the first prompt's tokens kept
v3, tekken, without a system prompt: all of the first prompt's tokens kept
v7, with a system prompt: all of the first prompt's tokens kept
v7, without a system prompt: all of the first prompt's tokens kept
<s>[INST]What is a sonnet?[/INST]Fourteen lines.</s>[INST]You answer in rhymes.

And a limerick?[/INST]
SEEN
