#!/usr/bin/env bash
# xgrammar 0.2.9 and llguidance 1.9.1: a JSON schema that one refuses lets any value through in the other.
#
# Expected: a keyword that a compiler of schemas cannot enforce is refused, as llguidance does by the keyword's name.
# Seen: xgrammar compiles "not", "uniqueItems", "if" with "then", "dependentRequired" and an enum that its type excludes
#   with no error and no warning, and its matcher accepts documents that break each. (It does enforce multipleOf, contains
#   and propertyNames, and warns of allOf, of oneOf, and of a pattern next to lengths.)
# Matters for: servers that offer structured output with a choice of the two. A request is refused by one and answered
#   by the other with a document that its schema forbids.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json

import llguidance
import xgrammar

NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
CASES = {
    "not": ({"not": {"type": "string"}}, '"a"'),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
    "if": ({"type": "object", "properties": NUMBERS, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a": 1}'),
    "dependentRequired": (
        {"type": "object", "properties": NUMBERS, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    "enum": ({"type": "string", "enum": [1]}, "1"),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, "7"),
}
characters = [chr(code) for code in range(32, 127)]
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([*characters, "</s>"], stop_token_ids=[95]))
for name, (schema, wrong) in CASES.items():
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    accepts = matcher.accept_string(wrong) and matcher.accept_token(95)
    refusal = llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(schema))
    print(f"{name}: xgrammar {'accepts' if accepts else 'stops'} {wrong}, llguidance {refusal or 'compiles it'}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check xgrammar==0.2.9 llguidance==1.9.1 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" 2>/dev/null)
printf 'documents that break their schema, with xgrammar 0.2.9 and llguidance 1.9.1\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
not: xgrammar accepts "a", llguidance Unimplemented keys: ["not"]
uniqueItems: xgrammar accepts [1, 1], llguidance Unimplemented keys: ["uniqueItems"]
if: xgrammar accepts {"a": 1}, llguidance Unimplemented keys: ["if", "then"]
dependentRequired: xgrammar accepts {"a": 1}, llguidance Unimplemented keys: ["dependentRequired"]
enum: xgrammar accepts 1, llguidance Unsatisfiable schema: incompatible types
multipleOf: xgrammar stops 7, llguidance compiles it
SEEN
