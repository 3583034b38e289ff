"""Texts that tell tokenizers apart, whatever the tokenizer."""

# ruff: noqa: RUF001 - characters that look like others are what these texts are for

PROBES = (
    "Hello world", " leading", "trailing ", "two  spaces", "   three   of   them   ", " ", "    ",
    "a", "\t", "\n", "tab\tand\nline", "\n\nlines\n\n", "dos\r\nlines\r\n", "end \n of line",
    "1", "12345 67 890.12", "3.14e-10, 1,000,000", "don't we'll I'M THEY'RE", "CamelCase snake_c",
    "The quick brown fox jumps over the lazy dog.", "THE QUICK (BROWN) [FOX] {JUMPS}!?",
    "def f(x):\n    return x ** 2  # done\n", "https://example.org/?q=1&r=%20#top",
    "café naïve Ünïcödé ß İı ſ", "cafe\u0301 u\u0308ber", "ﬁne ﬀ ½ ① ㈱ ℃ …",
    "ｗｏｒｌｄ １２　全角", "ｶﾞｷﾞ カ\u3099", "\u1112\u1161\u11ab 한국어 안녕하세요",
    "Привет, мир", "Καλημέρα", "你好，世界。", "日本語のテキスト", "مرحبا بالعالم",
    "नमस्ते दुनिया क्षि",
    "สวัสดี", "שלום", "ﷺ", "𝔘𝔫𝔦", "🙂 👩\u200d👩\u200d👧 🇩🇪", "\u00a0hard\u00a0space",
    "zero\u200bwidth \ufeffmark", "\ufffd", "▁", "a▁b", "<s>", "a <s> b</s>", "<unk>",
    "<pad><mask>", "<0x41>", "<|endoftext|>", "[CLS] a [SEP]", "[INST] x [/INST]",
    "<extra_id_0> <extra_id_1>", "ꙮ ⵣ 𐍈", "a" * 100, "-" * 70, "x\u0000y\u0007",
)  # fmt: skip
