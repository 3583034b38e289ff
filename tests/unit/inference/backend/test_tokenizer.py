"""Tokenizers from files: round trips, unknown ids, unfinished characters, word lists."""

import json
from pathlib import Path

import numpy as np
import pytest

from inference.backend.text_models import pad_rows, split_words, word_list_tensor
from inference.backend.tokenizer import Tokenizer, load_tokenizer


def _byte_vocabulary(folder: Path, merges: list[str], *, newline: bool = True) -> Path:
    """Write a byte-level vocabulary of the 256 bytes and these merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), *("".join(merge.split()) for merge in merges)]
    (folder / "vocab.json").write_text(
        json.dumps({token: index for index, token in enumerate(tokens)})
    )
    text = "\n".join(["#version: 0.2", *merges])
    (folder / "merges.txt").write_text(text + ("\n" if newline else ""))
    return folder


@pytest.fixture
def bpe(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(_byte_vocabulary(tmp_path, ["h e", "l l", "he ll", "\u0120 w"]))


@pytest.mark.parametrize(
    "text",
    ["hello world", "  two  blanks ", "\u00e9\u4f60\U0001f469\u200d\U0001f467", "a\nb\tc", ""],
)
def test_any_text_survives_encoding_and_decoding(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


@pytest.mark.parametrize("newline", [True, False])
def test_last_merge_counts_with_and_without_a_final_newline(tmp_path, newline):
    tokenizer = load_tokenizer(_byte_vocabulary(tmp_path, ["a b", "ab c"], newline=newline))
    assert len(tokenizer.encode("abc")) == 1


def test_ids_outside_the_vocabulary_become_the_replacement_character(bpe):
    ids = bpe.encode("he")
    assert bpe.decode([bpe.vocab_size, *ids, 10**6]) == "\ufffdhe\ufffd"


def test_partial_text_grows_by_whole_characters(bpe):
    text = "a\u00e9\u4f60\U0001f469b"
    ids = bpe.encode(text)
    shown = [bpe.decode(ids[:count], partial=True) for count in range(len(ids) + 1)]
    assert all(text.startswith(each) for each in shown)
    assert shown[-1] == text
    assert bpe.decode(ids[:2]) == "a\ufffd"


def test_added_token_in_the_vocabulary_is_spelled_out(tmp_path):
    folder = _byte_vocabulary(tmp_path, [])
    vocab = json.loads((folder / "vocab.json").read_text())
    vocab["<|end of\u2019text|>"] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    assert load_tokenizer(folder).decode([len(vocab) - 1]) == "<|end of\u2019text|>"


def test_huggingface_file_maps_unknown_ids_and_holds_back_unfinished_characters(
    tmp_path,
):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, pre_tokenizers
    from tokenizers.models import BPE

    folder = _byte_vocabulary(tmp_path, ["h e"])
    backend = Backend(BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)  # preferred to the two other files
    ids = tokenizer.encode("he\u4f60")
    assert tokenizer.decode([*ids, 9999]) == "he\u4f60\ufffd"
    assert [tokenizer.decode(ids[:n], partial=True) for n in range(1, 5)] == [
        "he",
        "he",
        "he",
        "he\u4f60",
    ]


def test_sentencepiece_model_round_trips(tmp_path):
    import sentencepiece

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(["the quick brown fox jumps over the lazy dog"] * 50))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("the lazy fox")
    assert tokenizer.decode(ids) == "the lazy fox"
    assert tokenizer.decode([*ids, tokenizer.vocab_size + 7]) == "the lazy fox\ufffd"


# Two families of one emoji, and characters of two, three and four bytes side by side.
MANY_BYTES = "a\u00e9\u4f60\u597d\u3002 \U0001f469\u200d\U0001f467\U0001f600\U0001f601b"


def _llama_json(folder: Path) -> Path:
    """Write a tokenizer.json like Llama's: spaces as pieces, bytes for what is not in it."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, normalizers, processors
    from tokenizers.models import BPE

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abcdefghijklmnopqrstuvwxyz.!", "\u2581a", "\u2581b"]
    merges = [("\u2581", "a"), ("\u2581", "b")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    blanks = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), blanks])
    unfold = decoders.Replace("\u2581", " ")
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([unfold, decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def _llama_sentencepiece(folder: Path) -> Path:
    import sentencepiece

    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(["the quick brown fox. jumps over! the lazy dog"] * 50))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        byte_fallback=True,
        vocab_size=320,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder


@pytest.mark.parametrize("write", [_llama_json, _llama_sentencepiece])
def test_characters_of_byte_tokens_are_shown_whole(tmp_path, write):
    tokenizer = load_tokenizer(write(tmp_path))
    ids = tokenizer.encode(MANY_BYTES)
    shown = [tokenizer.decode(ids[:count], partial=True) for count in range(len(ids) + 1)]
    assert all(MANY_BYTES.startswith(each) for each in shown)
    assert shown[-1] == tokenizer.decode(ids) == MANY_BYTES


@pytest.mark.parametrize("write", [_llama_json, _llama_sentencepiece])
def test_invalid_bytes_do_not_spoil_their_neighbours(tmp_path, write):
    tokenizer = load_tokenizer(write(tmp_path))
    whole, other = tokenizer.encode("\u4f60")[-3:], tokenizer.encode("\u597d")[-3:]
    # Cut short by the limit, and in the middle.
    assert tokenizer.decode([*whole, *other[:2]]) == "\u4f60\ufffd"
    assert tokenizer.decode([*whole, *other[:1], *other]) == "\u4f60\ufffd\u597d"


def test_words_are_also_listed_as_they_are_within_a_text(tmp_path):
    tokenizer = load_tokenizer(_llama_json(tmp_path))
    dot, blank = tokenizer.encode("a.")[-1], tokenizer.encode(" ")[0]
    assert tokenizer.word_forms(".") == [[blank, dot], [dot]]
    # With a space before it, only the second form is what a text holds.
    assert tokenizer.word_forms(" b")[1] == tokenizer.encode("b")
    newline = tokenizer.word_forms("\n")[1]
    assert tokenizer.decode([*tokenizer.encode("a"), *newline]) == "a\n"
    tensor = word_list_tensor([".,,"], tokenizer, name="X")
    assert tensor.tolist() == [[[blank, dot, dot], [2, 3, -1]]]


def test_words_of_a_byte_level_vocabulary_have_one_form(bpe):
    assert bpe.word_forms(" he") == [bpe.encode(" he")]


def _settings(folder: Path, **values: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def test_settings_put_a_start_token_before_prompts_and_not_before_words(tmp_path):
    folder = _byte_vocabulary(tmp_path, [])
    vocab = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps({**vocab, "</s>": len(vocab)}))
    _settings(folder, add_bos_token=True, bos_token={"content": "</s>", "special": True})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.prefix_ids == (len(vocab),)
    assert tokenizer.encode("a", special=True) == [len(vocab), *tokenizer.encode("a")]
    _settings(folder, add_bos_token=False, bos_token="</s>")
    assert load_tokenizer(folder).prefix_ids == ()
    _settings(folder, add_bos_token=True, bos_token="<nowhere>")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json in .* cannot be read"):
        load_tokenizer(folder)


@pytest.mark.parametrize("configured", [True, False])
def test_start_token_of_a_huggingface_file_is_put_once(tmp_path, configured):
    folder = _llama_json(tmp_path)
    if configured:
        _settings(folder, add_bos_token=True, bos_token="<s>")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.prefix_ids == (1,)
    assert tokenizer.encode("a", special=True) == [1, *tokenizer.encode("a")]


def test_truncation_and_padding_that_a_file_states_are_not_applied(tmp_path):
    from tokenizers import Tokenizer as Backend

    path = str(_llama_json(tmp_path) / "tokenizer.json")
    expected = load_tokenizer(tmp_path).encode("a b c d e", special=True)
    backend = Backend.from_file(path)
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=99)
    backend.save(path)
    assert load_tokenizer(tmp_path).encode("a b c d e", special=True) == expected


def test_sentencepiece_model_gets_the_start_token_of_its_settings(tmp_path):
    folder = _llama_sentencepiece(tmp_path)
    _settings(folder, add_bos_token=True, bos_token="<s>")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("the", special=True) == [1, *tokenizer.encode("the")]


@pytest.mark.parametrize(
    ("settings", "marked"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, True),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, False),
        ({"tokenizer_class": "LlamaTokenizer", "bos_token": ""}, False),
        ({"tokenizer_class": "T5Tokenizer", "bos_token": "<s>"}, False),
    ],
)
def test_llama_puts_a_start_token_unless_its_settings_say_otherwise(tmp_path, settings, marked):
    folder = _llama_sentencepiece(tmp_path)
    _settings(folder, **settings)
    assert load_tokenizer(folder).prefix_ids == ((1,) if marked else ())


def test_folder_without_tokenizer_and_unknown_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no tokenizer; expected tokenizer\.json; vocab"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="tokenizer_type='tiktoken' is unknown; known types: hf"):
        load_tokenizer(tmp_path, kind="tiktoken")


NO_TOKEN = '{"add_bos_token": true, "bos_token": "z"}'


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("vocab.json", "[]", "not a JSON object"),
        ("vocab.json", '{"a": {}}', "cannot be read"),
        ("merges.txt", "z z\n", "out of vocabulary"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object"),
        (
            "tokenizer_config.json",
            "[" * 100_000,
            "tokenizer_config.json is not a JSON object: it is nested",
        ),
        ("tokenizer_config.json", NO_TOKEN, "there is no token 'z'"),
        ("tokenizer_config.json", '{"add_bos_token": 1, "bos_token": [1]}', "cannot be read"),
    ],
)
def test_odd_tokenizer_files_are_refused(tmp_path, name, content, reason):
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=reason):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "tokenizer.json"])
def test_broken_tokenizer_file_is_named(tmp_path, name):
    (tmp_path / name).write_text("{not json")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(ValueError, match=f"{name}.* cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)


def test_blanks_and_quotes_of_word_lists_count():
    assert split_words('a, b,"c,d","e""f", "g') == ["a", " b", "c,d", 'e"f', ' "g']


def test_word_lists_pad_to_the_longest_row_and_skip_empty_words(bpe):
    tensor = word_list_tensor(["hell,,h", ""], bpe, name="X")
    ids = [*bpe.encode("hell"), *bpe.encode("h")]
    assert tensor.tolist() == [[ids, [1, 2]], [[0, 0], [-1, -1]]]


def test_word_list_with_a_bare_line_break_names_its_row(bpe):
    with pytest.raises(ValueError, match=r"STOP_WORDS_DICT\[1\]: 'a\\nb' is not one CSV record"):
        word_list_tensor(["ok", "a\nb"], bpe, name="STOP_WORDS_DICT")


def test_rows_are_padded_on_the_right():
    ids, lengths = pad_rows([[1, 2, 3], [], [4]], pad_id=9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 9], [4, 9, 9]]
    assert lengths.tolist() == [[3], [0], [1]]
    assert ids.dtype == lengths.dtype == np.uint32


def test_a_panic_of_the_library_is_a_reason(bpe, tmp_path, monkeypatch):
    class PanicError(BaseException):
        pass

    def encode(*_, **__):
        raise PanicError("no entry found")

    monkeypatch.setattr(type(bpe), "encode", encode)
    with pytest.raises(ValueError, match=r"cannot be read as a tokenizer: no entry found"):
        load_tokenizer(tmp_path)
