#!/usr/bin/env bash
# tokenizers 0.23.3 and sentencepiece 0.2.3: one table of characters, two results.
#
# Expected: tokenizers' normalizer Precompiled takes the table of a SentencePiece model (precompiled_charsmap) and
#   does what SentencePiece does with it.
# Seen: it looks a whole grapheme up and keeps what the longest known beginning becomes. With nmt_nfkc and nfkc, the
#   second of two combining marks is lost, a mark after a ligature is lost, and Hangul in jamo is not composed, where
#   SentencePiece keeps and composes them. With nmt_nfkc, \r\n becomes one space, not two.
# Matters for: a tokenizer.json made from a SentencePiece model, whose ids then differ for such texts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import io

from sentencepiece import SentencePieceNormalizer, SentencePieceTrainer, sentencepiece_model_pb2
from tokenizers import normalizers

TEXTS = {
    "two marks": "e\u0327\u0301",
    "ligature with a mark": "\ufb01\u0301",
    "jamo": "\u1100\u1161\u11a8",
    "line end": "a\r\nb",
    "one mark": "e\u0301",
}
for rule in ("nmt_nfkc", "nfkc"):
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox"] * 20), model_writer=written, model_type="char", vocab_size=24,
        hard_vocab_limit=False, normalization_rule_name=rule, add_dummy_prefix=False, remove_extra_whitespaces=False,
        minloglevel=2)
    model = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
    precompiled = normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)
    original = SentencePieceNormalizer(model_proto=written.getvalue(), escape_whitespaces=False)
    for name, text in TEXTS.items():
        print(rule, name, ascii(original.normalize(text)), ascii(precompiled.normalize_str(text)))
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3 sentencepiece==0.2.3 protobuf==7.36.2
seen=$("$folder/venv/bin/python" "$folder/show.py")
printf 'rule, text, sentencepiece, tokenizers\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
nmt_nfkc two marks '\u0229\u0301' '\u0229'
nmt_nfkc ligature with a mark 'fi\u0301' 'fi'
nmt_nfkc jamo '\uac01' '\u1100\u1161\u11a8'
nmt_nfkc line end 'a  b' 'a b'
nmt_nfkc one mark '\xe9' '\xe9'
nfkc two marks '\u0229\u0301' '\u0229'
nfkc ligature with a mark 'fi\u0301' 'fi'
nfkc jamo '\uac01' '\u1100\u1161\u11a8'
nfkc line end 'a\r\nb' 'a\r\nb'
nfkc one mark '\xe9' '\xe9'
SEEN
