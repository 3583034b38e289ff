#!/usr/bin/env bash
# tokenizers 0.23.3 and tiktoken 0.14.0: two pre-tokenizers of one documented pattern split a text differently.
#
# Expected: the pre-tokenizer Whitespace "splits on word boundaries", by the pattern \w+|[^\w\s]+ of its documentation,
#   so that Split with Regex(r"\w+|[^\w\s]+") gives the same pieces.
# Seen: tokenizers has two regular expression engines. For Whitespace's, as for tiktoken's, the joiners U+200C and U+200D
#   are of a word and the digits of superscripts and fractions are not; for the engine of Split it is the other way
#   round. A Persian word with its joiner is one piece or three, "m²" two or one.
# Matters for: tokenizers that are carried from tiktoken or from Rust's engine to a Split in tokenizer.json. The letters
#   (\p{L}), numbers (\p{N}) and spaces (\s) of all code points are the same, and \w alone is not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import tiktoken
from tokenizers import Regex, pre_tokenizers

PATTERN = r"\w+|[^\w\s]+"
whitespace = pre_tokenizers.Whitespace()
split = pre_tokenizers.Split(Regex(PATTERN), behavior="removed", invert=True)
for text in ("m\u00b2", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"):
    counts = [len(pre_tokenizer.pre_tokenize_str(text)) for pre_tokenizer in (whitespace, split)]
    print(f"{ascii(text)}: {counts[0]} with Whitespace, {counts[1]} with Split")

single_bytes = {bytes([value]): value for value in range(256)}
for pattern in (r"\w", r"\p{L}", r"\p{N}", r"\s"):
    encoding = tiktoken.Encoding(
        "one_class", pat_str=pattern, mergeable_ranks=single_bytes, special_tokens={}
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    texts = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    unlike = [
        f"U+{ord(text):04X}"
        for text in texts
        if bool(encoding.encode_ordinary(text)) != bool(split.pre_tokenize_str(text))
    ]
    print(f"{pattern}: unlike in tiktoken and Split for {' '.join(unlike) or 'none'}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3 tiktoken==0.14.0
seen=$("$folder/venv/bin/python" "$folder/show.py")
printf 'Pieces, and code points of a class, tokenizers 0.23.3 and tiktoken 0.14.0\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
'm\xb2': 2 with Whitespace, 1 with Split
'\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645': 1 with Whitespace, 3 with Split
\w: unlike in tiktoken and Split for U+00B2 U+00B3 U+00B9 U+00BC U+00BD U+00BE U+200C U+200D
\p{L}: unlike in tiktoken and Split for none
\p{N}: unlike in tiktoken and Split for none
\s: unlike in tiktoken and Split for none
SEEN
