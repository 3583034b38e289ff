#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: add_bos_token and add_eos_token of a Llama's folder count in the older release alone.
#
# Expected: both keys of tokenizer_config.json, which LlamaTokenizer and GemmaTokenizer of both releases know, decide whether
#   a text gets a first and a last token; and a folder that says nothing of them is read alike.
# Seen: 4.57.6 goes by the keys, and where they are missing puts the first token there. 5.24.0 goes by the post-processor of
#   tokenizer.json alone: a template that puts the first token there does so despite add_bos_token=false; without a
#   template there is none despite add_bos_token=true. add_eos_token has no effect. No message names the keys.
# Matters for: prompts, whose log probabilities change a lot with the first token, and training with add_eos_token=true: the
#   newer release never shows the model an end. A folder that must be read alike states both in its template.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer

folder = Path(sys.argv[1])
folder.mkdir()
(folder / "config.json").write_text('{"model_type": "llama"}')
pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abc", "\u2581a"]
model = models.BPE(
    vocab={piece: place for place, piece in enumerate(pieces)}, merges=[("\u2581", "a")],
    unk_token="<unk>", byte_fallback=True, fuse_unk=True)
tokenizer = Tokenizer(model)
tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
tokenizer.decoder = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
common = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
for template in (None, "<s> $A"):
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("LlamaTokenizer", "GemmaTokenizer"):
        for keys in ({}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}):
            settings = {"tokenizer_class": name, **common, **keys}
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
            tokens = AutoTokenizer.from_pretrained(folder)("ab").tokens()
            ends = " ".join(token for token in tokens if token in ("<s>", "</s>")) or "-"
            print(f"{name}, template {template}, {json.dumps(keys)}: {ends}")
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" numpy==2.2.6
  "$folder/$1/bin/python" "$folder/show.py" "$folder/files_$1" 2>"$folder/errors" || { cat "$folder/errors"; exit 1; }
}

before=$(show 4.57.6)
after=$(show 5.24.0)
printf 'First and last tokens with transformers 4.57.6:\n%s\n5.24.0:\n%s\n' "$before" "$after"
diff - <(printf '%s\n' "$before") <<'SEEN'
LlamaTokenizer, template None, {}: <s>
LlamaTokenizer, template None, {"add_bos_token": true}: <s>
LlamaTokenizer, template None, {"add_bos_token": false}: -
LlamaTokenizer, template None, {"add_eos_token": true}: <s> </s>
GemmaTokenizer, template None, {}: <s>
GemmaTokenizer, template None, {"add_bos_token": true}: <s>
GemmaTokenizer, template None, {"add_bos_token": false}: -
GemmaTokenizer, template None, {"add_eos_token": true}: <s> </s>
LlamaTokenizer, template <s> $A, {}: <s>
LlamaTokenizer, template <s> $A, {"add_bos_token": true}: <s>
LlamaTokenizer, template <s> $A, {"add_bos_token": false}: -
LlamaTokenizer, template <s> $A, {"add_eos_token": true}: <s> </s>
GemmaTokenizer, template <s> $A, {}: <s>
GemmaTokenizer, template <s> $A, {"add_bos_token": true}: <s>
GemmaTokenizer, template <s> $A, {"add_bos_token": false}: -
GemmaTokenizer, template <s> $A, {"add_eos_token": true}: <s> </s>
SEEN
diff - <(printf '%s\n' "$after") <<'SEEN'
LlamaTokenizer, template None, {}: -
LlamaTokenizer, template None, {"add_bos_token": true}: -
LlamaTokenizer, template None, {"add_bos_token": false}: -
LlamaTokenizer, template None, {"add_eos_token": true}: -
GemmaTokenizer, template None, {}: -
GemmaTokenizer, template None, {"add_bos_token": true}: -
GemmaTokenizer, template None, {"add_bos_token": false}: -
GemmaTokenizer, template None, {"add_eos_token": true}: -
LlamaTokenizer, template <s> $A, {}: <s>
LlamaTokenizer, template <s> $A, {"add_bos_token": true}: <s>
LlamaTokenizer, template <s> $A, {"add_bos_token": false}: <s>
LlamaTokenizer, template <s> $A, {"add_eos_token": true}: <s>
GemmaTokenizer, template <s> $A, {}: <s>
GemmaTokenizer, template <s> $A, {"add_bos_token": true}: <s>
GemmaTokenizer, template <s> $A, {"add_bos_token": false}: <s>
GemmaTokenizer, template <s> $A, {"add_eos_token": true}: <s>
SEEN
