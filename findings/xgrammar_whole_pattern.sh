#!/usr/bin/env bash
# xgrammar 0.2.9 and llguidance 1.9.1: "pattern" of a JSON schema is the whole string in one, a part of it in the other.
#
# Expected: a pattern without anchors may match anywhere in a string (JSON Schema Validation, 6.3.3): "^ab" allows "abc".
# Seen: xgrammar takes every pattern as if it stood between ^ and $, with no warning: for "^ab" its matcher accepts "ab"
#   alone. llguidance follows the standard.
# Matters for: structured output. A server with xgrammar can only ever answer "ab", which the schema allows, so that no
#   validation shows it; the same request at a server with llguidance gives strings that continue.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json

import llguidance
import xgrammar

characters = [chr(code) for code in range(32, 127)]
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([*characters, "</s>"], stop_token_ids=[95]))


class Characters:
    """A tokenizer of one character each, as llguidance takes it."""

    eos_token_id, bos_token_id, special_token_ids = 95, None, [95]
    tokens = [*(each.encode() for each in characters), b"</s>"]

    def __call__(self, text):
        return [code - 32 for code in text]


tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Characters()))
for pattern, text in (("^ab", '"ab"'), ("^ab", '"abc"'), ("b", '"abc"'), ("c$", '"abc"'), ("^ab$", '"abc"')):
    schema = json.dumps({"type": "string", "pattern": pattern})
    one = xgrammar.GrammarMatcher(compiler.compile_json_schema(schema))
    other = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(schema))
    ids = [ord(each) - 32 for each in text]
    first = one.accept_string(text) and one.accept_token(95)
    second = other.validate_tokens(ids) == len(ids)
    print(f"{pattern} and {text}: xgrammar {'accepts' if first else 'refuses'}, llguidance {'accepts' if second else 'refuses'}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check xgrammar==0.2.9 llguidance==1.9.1 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" 2>/dev/null)
printf 'with xgrammar 0.2.9 and llguidance 1.9.1\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
^ab and "ab": xgrammar accepts, llguidance accepts
^ab and "abc": xgrammar refuses, llguidance accepts
b and "abc": xgrammar refuses, llguidance accepts
c$ and "abc": xgrammar refuses, llguidance accepts
^ab$ and "abc": xgrammar refuses, llguidance refuses
SEEN
