#!/usr/bin/env bash
# tokenizers 0.23.3: a byte-level BPE drops the bytes that its training text did not have.
#
# Expected: a byte-level tokenizer has all 256 bytes, which is what it is made for, so that each text comes back from its ids;
#   or a byte that is not in the vocabulary is an error, as a missing word of WordLevel is.
# Seen: BpeTrainer takes the bytes that occur, unless initial_alphabet names more. Without an unk_token the model leaves out
#   bytes that it does not know: a tokenizer trained on English gives "Zürich" the ids of "Zrich", a name in Chinese none,
#   and "{x: 3}" those of a space. encode and decode give no error or warning.
# Matters for: vocabularies of one's own and vocabularies that were cut: the text that the model sees lacks letters, answers are
#   about another text, and lengths and log probabilities are those of what is left.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
LINES = ["the ship left Zurich for the harbour, in 2015 and again in 2016"] * 20
for name, settings in (("defaults", {}), ("initial_alphabet", {"initial_alphabet": ALPHABET})):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=400, show_progress=False, **settings))
    for text in ("the ship", "Z\u00fcrich", "\u6771\u4eac", "{x: 3}"):
        encoding = tokenizer.encode(text)
        print(f"{name}: {ascii(text)} has {len(encoding.ids)} tokens, which are {ascii(tokenizer.decode(encoding.ids))}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
seen=$("$folder/venv/bin/python" "$folder/show.py")
printf 'Texts in a byte-level BPE of tokenizers 0.23.3, trained on English\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
defaults: 'the ship' has 2 tokens, which are 'the ship'
defaults: 'Z\xfcrich' has 3 tokens, which are 'Zrich'
defaults: '\u6771\u4eac' has 0 tokens, which are ''
defaults: '{x: 3}' has 1 tokens, which are ' '
initial_alphabet: 'the ship' has 2 tokens, which are 'the ship'
initial_alphabet: 'Z\xfcrich' has 5 tokens, which are 'Z\xfcrich'
initial_alphabet: '\u6771\u4eac' has 6 tokens, which are '\u6771\u4eac'
initial_alphabet: '{x: 3}' has 6 tokens, which are '{x: 3}'
SEEN
