#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: a SentencePiece model's settings are passed over for those of the published models.
#
# Expected: tokenizer.model states how a text is normalised and what becomes of its spaces; a Llama's or T5's folder
#   with a model of one's own gives the ids of sentencepiece, or is refused.
# Seen: where such a folder has no tokenizer.json, AutoTokenizer treats texts as Llama's or T5's own model does. Llama's
#   normalises nothing and keeps all spaces: with a model that was trained by sentencepiece's defaults (nmt_nfkc, spaces
#   joined) tabs, ligatures and indentation have other ids. T5's joins spaces although remove_extra_whitespaces is
#   false, so that indentation is lost. Both put a space in front despite add_dummy_prefix=False. There is no warning.
# Matters for: models with a vocabulary of their own that were trained on the ids of sentencepiece: plain prose agrees,
#   code and scanned text do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json
import random
import sys
from pathlib import Path

import sentencepiece
from transformers import AutoTokenizer

folder = Path(sys.argv[1])
folder.mkdir()
random.seed(0)
words = "the ship left harbour def return if value print a of and x".split()
corpus = folder / "corpus.txt"
corpus.write_text("\n".join(" ".join(random.choices(words, k=8)) for _ in range(2000)))
CLASSES = {"bpe": ("llama", "LlamaTokenizer", "tokenizer.model"), "unigram": ("t5", "T5Tokenizer", "spiece.model")}
for kind, settings in (
    ("bpe", {}),
    ("unigram", {}),
    ("unigram", {"remove_extra_whitespaces": False}),
    ("bpe", {"add_dummy_prefix": False}),
    ("unigram", {"add_dummy_prefix": False}),
):
    model_type, name, file = CLASSES[kind]
    own = folder / f"{kind}{'_'.join(settings)}"
    own.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(own / "own"), model_type=kind, byte_fallback=kind == "bpe",
        vocab_size=400, hard_vocab_limit=False, minloglevel=2, **settings)
    (own / "own.model").rename(own / file)
    (own / "config.json").write_text(json.dumps({"model_type": model_type}))
    (own / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, "legacy": False, "extra_ids": 0}))
    source = sentencepiece.SentencePieceProcessor(model_file=str(own / file))
    tokenizer = AutoTokenizer.from_pretrained(own)
    print(f"{name}, {settings or 'defaults of training'}")
    for text in ("the ship", "the\tship", "\ufb01", "    return x"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if ids != source.encode(text):
            pieces = source.encode(text, out_type=str), tokenizer.convert_ids_to_tokens(ids)
            print(f"  {ascii(text)}: {' then '.join(ascii(' '.join(each)) for each in pieces)}")
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" \
    sentencepiece==0.2.3 protobuf==7.36.2 tiktoken==0.14.0 numpy==2.2.6
  "$folder/$1/bin/python" "$folder/show.py" "$folder/files_$1" 2>"$folder/errors" || { cat "$folder/errors"; exit 1; }
}

before=$(show 4.57.6)
after=$(show 5.24.0)
printf 'Pieces of sentencepiece 0.2.3, then those of transformers 4.57.6 and 5.24.0, where they differ\n%s\n' "$after"
diff <(printf '%s\n' "$before") <(printf '%s\n' "$after")
diff - <(printf '%s\n' "$after") <<'SEEN'
LlamaTokenizer, defaults of training
  'the\tship': '\u2581the \u2581ship' then '\u2581the <0x09> s hip'
  '\ufb01': '\u2581 f i' then '\u2581 <0xEF> <0xAC> <0x81>'
  '    return x': '\u2581return \u2581x' then '\u2581 \u2581 \u2581 \u2581return \u2581x'
T5Tokenizer, defaults of training
T5Tokenizer, {'remove_extra_whitespaces': False}
  '    return x': '\u2581 \u2581 \u2581 \u2581 \u2581return \u2581x' then '\u2581return \u2581x'
LlamaTokenizer, {'add_dummy_prefix': False}
  'the ship': 'the \u2581ship' then '\u2581the \u2581ship'
  'the\tship': 'the \u2581ship' then '\u2581the <0x09> ship'
  '\ufb01': 'f i' then '\u2581 <0xEF> <0xAC> <0x81>'
  '    return x': 'return \u2581x' then '\u2581 \u2581 \u2581 \u2581return \u2581x'
T5Tokenizer, {'add_dummy_prefix': False}
  'the ship': 'the \u2581ship' then '\u2581the \u2581ship'
  'the\tship': 'the \u2581ship' then '\u2581the \u2581ship'
  '\ufb01': 'f i' then '\u2581 f i'
  '    return x': 'return \u2581x' then '\u2581return \u2581x'
SEEN
