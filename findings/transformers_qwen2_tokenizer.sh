#!/usr/bin/env bash
# transformers 5.24.0: the tokenizer of a model of type qwen2 is Qwen2Tokenizer, whatever the folder says.
#
# Expected: AutoTokenizer obeys tokenizer_class of tokenizer_config.json, and PreTrainedTokenizerFast is what
#   tokenizer.json says.
# Seen: with model_type qwen2 in config.json, 5.24.0 builds a Qwen2Tokenizer from the vocabulary and the merges, with the
#   pre-tokenizer of Qwen2; the ids of the same text differ, with no warning. 4.57.6 obeys the folder, and so does 5.24.0
#   for model_type llama.
# Matters for: Qwen2-like models with another tokenizer, as fine-tunes with a vocabulary of their own have.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

folder = Path(tempfile.mkdtemp())
words = ["<unk>", "\u2581", "a", "b", "\u2581a", "ab", "\u2581ab", "1", "2", "12"]
merges = [("\u2581", "a"), ("\u2581a", "b"), ("a", "b"), ("1", "2")]
own = Tokenizer(models.BPE({word: id_ for id_, word in enumerate(words)}, merges, unk_token="<unk>"))
own.pre_tokenizer = pre_tokenizers.Metaspace()
own.decoder = decoders.Metaspace()
own.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
seen = [f"file {own.encode('ab 12').ids}"]
for model_type in ("llama", "qwen2"):
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    ids = AutoTokenizer.from_pretrained(folder)("ab 12", add_special_tokens=False).input_ids
    seen.append(f"{model_type} {ids}")
print("; ".join(seen))
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" numpy==2.2.6
  "$folder/$1/bin/python" "$folder/show.py" 2>/dev/null
}

before=$(show 4.57.6)
after=$(show 5.24.0)
printf 'transformers 4.57.6: %s\ntransformers 5.24.0: %s\n' "$before" "$after"
[ "$before" = "file [6, 1, 9]; llama [6, 1, 9]; qwen2 [6, 1, 9]" ] &&
  [ "$after" = "file [6, 1, 9]; llama [6, 1, 9]; qwen2 [5, 7, 8]" ]
