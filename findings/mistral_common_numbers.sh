#!/usr/bin/env bash
# mistral-common 1.13.1: a tool's result 3.10 reaches the model as 3.1, and the arguments of its call as 1.1 for 1.10.
#
# Expected: the content of a tool's message is a text: the prompt has it letter by letter, as any other message's.
# Seen: the formats v2 and v3, of Mistral 7B v0.3, Mixtral and Mistral NeMo, read a content that is JSON and write it anew: "3.10"
#   is 3.1, "1e400" is Infinity, 0.30000000000000000001 is 0.3, and of equal keys the last is left; "3.10.0", which is not
#   JSON, stays. v7 keeps results, and all three write a call's arguments anew. Nothing is said.
# Matters for: tools that answer with a version, an amount or an identifier: the model sees another one, depending on its
#   tokenizer's version, and a client that renders the prompt by a chat template gets other tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

CALL = "123456789"
formats = {
    "v2": MistralTokenizer.v2(),
    "v3": MistralTokenizer.v3(),
    "v3, tekken": MistralTokenizer.v3(is_tekken=True),
    "v7": MistralTokenizer.v7(),
}
for name, tokenizer in formats.items():
    for result in ("3.10", "3.10.0", "1e400", '{"price": 0.30000000000000000001, "id": 1, "id": 2}'):
        call = ToolCall(id=CALL, function=FunctionCall(name="f", arguments='{"x": 1.10}'))
        messages = [
            UserMessage(content="?"),
            AssistantMessage(content=None, tool_calls=[call]),
            ToolMessage(content=result, tool_call_id=CALL, name="f"),
        ]
        prompt = tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages)).text.replace("\u2581", " ")
        called, answered = prompt.split("[TOOL_RESULTS]")
        arguments = called[called.index('"arguments"'):].split("}")[0]
        print(f"{name}, {result}: {answered.removesuffix('[/TOOL_RESULTS]').strip()}")
    print(f"{name}: {arguments}}}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mistral-common==1.13.1 sentencepiece==0.2.3 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" 2>"$folder/errors") || { cat "$folder/errors"; exit 1; }
printf 'Results of tools in prompts of mistral-common 1.13.1, and arguments {"x": 1.10} of the call\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
v2, 3.10: [{"name": "f", "content": 3.1}]
v2, 3.10.0: [{"name": "f", "content": "3.10.0"}]
v2, 1e400: [{"name": "f", "content": Infinity}]
v2, {"price": 0.30000000000000000001, "id": 1, "id": 2}: [{"name": "f", "content": {"price": 0.3, "id": 2}}]
v2: "arguments": {"x": 1.1}
v3, 3.10: {"content": 3.1, "call_id": "123456789"}
v3, 3.10.0: {"content": "3.10.0", "call_id": "123456789"}
v3, 1e400: {"content": Infinity, "call_id": "123456789"}
v3, {"price": 0.30000000000000000001, "id": 1, "id": 2}: {"content": {"price": 0.3, "id": 2}, "call_id": "123456789"}
v3: "arguments": {"x": 1.1}
v3, tekken, 3.10: {"content": 3.1, "call_id": "123456789"}
v3, tekken, 3.10.0: {"content": "3.10.0", "call_id": "123456789"}
v3, tekken, 1e400: {"content": Infinity, "call_id": "123456789"}
v3, tekken, {"price": 0.30000000000000000001, "id": 1, "id": 2}: {"content": {"price": 0.3, "id": 2}, "call_id": "123456789"}
v3, tekken: "arguments": {"x": 1.1}
v7, 3.10: 123456789[TOOL_CONTENT] 3.10
v7, 3.10.0: 123456789[TOOL_CONTENT] 3.10.0
v7, 1e400: 123456789[TOOL_CONTENT] 1e400
v7, {"price": 0.30000000000000000001, "id": 1, "id": 2}: 123456789[TOOL_CONTENT] {"price": 0.30000000000000000001, "id": 1, "id": 2}
v7: "arguments": {"x": 1.1}
SEEN
