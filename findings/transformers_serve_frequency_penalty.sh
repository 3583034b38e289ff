#!/usr/bin/env bash
# transformers 5.24.0: the endpoint of `transformers serve` turns frequency_penalty into a repetition penalty.
#
# Expected: OpenAI's frequency_penalty subtracts its value from a token's logit once for each time the answer has
#   that token; tokens of the prompt do not count, and 0.5 is a mild value.
# Seen: a request with frequency_penalty 0.5 is computed with repetition_penalty 1.5, which divides or multiplies
#   logits, counts the prompt, and does not grow with the number of occurrences. presence_penalty has no effect.
# Matters for: evaluations and clients that set the field and compare servers.
# The script asks the class that answers chat completions for its generation settings; it starts no server.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerationState

handler = ChatCompletionHandler(ModelManager(), GenerationState())
for body in ({"frequency_penalty": 0.5}, {"presence_penalty": 0.5}):
    settings = handler._build_generation_config(body, GenerationConfig())
    print(*body, settings.repetition_penalty, end="; ")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  'transformers[serving]==5.24.0' numpy==2.2.6 fastapi==0.165.0 openai==3.57.0 starlette==1.10.0 uvicorn==0.54.0
seen=$("$folder/venv/bin/python" "$folder/show.py" 2>/dev/null)
printf 'transformers 5.24.0: %s\n' "$seen"
[ "$seen" = "frequency_penalty 1.5; presence_penalty None; " ]
