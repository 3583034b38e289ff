#!/usr/bin/env bash
# jinja2 3.1.6 and transformers 5.24.0: one chat template gives two prompts, by who renders its `tojson`.
#
# Expected: a chat template is a Jinja template, so that jinja2 renders of it what transformers renders.
# Seen: jinja2's own filter is meant for HTML: it writes <, >, & and ' as \u003c and the like, other characters outside
#   ASCII as well, and sorts keys. transformers replaces the filter: nothing is escaped, keys keep their order. Every
#   tool's description and parameters come out differently, and with them the prompt's tokens.
# Matters for: servers, evaluations and exports that render templates of models with tools by jinja2 alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jinja2==3.1.6 transformers==5.24.0 tokenizers==0.23.3

cat >"$folder/show.py" <<'PY'
import jinja2
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

TEMPLATE = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
parameters = {"type": "object", "properties": {"below": {"type": "number"}}}
tool = {"name": "find", "description": "prices < 5 € & 'free'", "parameters": parameters}

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
turns = [{"role": "user", "content": "a"}]
print(jinja2.Environment().from_string(TEMPLATE).render(tools=[tool]))
print(tokenizer.apply_chat_template(turns, tools=[tool], chat_template=TEMPLATE, tokenize=False))
PY

seen=$("$folder/venv/bin/python" "$folder/show.py" 2>/dev/null)
printf '%s\n' "$seen"
by_jinja2='{"description": "prices \u003c 5 \u20ac \u0026 \u0027free\u0027", "name": "find", '
by_jinja2+='"parameters": {"properties": {"below": {"type": "number"}}, "type": "object"}}'
by_transformers='{"name": "find", "description": "prices < 5 € & '"'free'"'", '
by_transformers+='"parameters": {"type": "object", "properties": {"below": {"type": "number"}}}}'
[ "$seen" = "$by_jinja2"$'\n'"$by_transformers" ]
