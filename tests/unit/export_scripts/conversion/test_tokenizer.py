"""Tokenizers of Hugging Face folders: equal to the source's, copied whole, refused or left out."""

# ruff: noqa: RUF001 - characters that look like others are what these texts are for

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from export_scripts.conversion.convert import (
    check_conversion,
    convert,
)
from export_scripts.conversion.tokenizer_probes import PROBES
from foundations.errors import CheckpointMismatchError
from inference.backend.tokenizer import load_tokenizer
from tests.conversions import folder_of, request_of, written
from tests.folder_answers import OTHERS, answered
from tests.looks import mentions
from tests.tiny import tiktoken_list, write_archive
from tests.tiny_megatron_core import CORE, core_state
from tests.tiny_transformers import write_model

LINES = (
    "the quick brown fox jumps over the lazy dog, and 12 345 more of them",
    "This is a small test: def f(x):\n return x ** 2",
    "Привет, мир! 你好，世界。 日本語のテキスト 안녕하세요 مرحبا नमस्ते",
    "<sep> <cls> café naïve über 3.14",
)
LLAMA2 = {
    "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False, "split_digits": True,
}  # fmt: skip
# Settings of sentencepiece's trainer, other than its own.
TRAINED: Mapping[str, Mapping[str, Any]] = {
    "unigram": {},
    "bpe": {"model_type": "bpe"},
    "char": {"model_type": "char"},
    "llama2": LLAMA2,
    "llama2 symbols": {**LLAMA2, "user_defined_symbols": ["<sep>", "<extra_id_1>", "<extra_id_0>"]},
    "gemma": {
        **LLAMA2, "add_dummy_prefix": False,
        "user_defined_symbols": ["\n", "\n\n", "\u2581" * 2, "\u2581" * 3, "\t", "<turn>"],
    },
    "unigram bytes": {"byte_fallback": True},
    "no dummy prefix": {"add_dummy_prefix": False},
    "all spaces": {"model_type": "bpe", "remove_extra_whitespaces": False},
    "suffix": {"treat_whitespace_as_suffix": True},
    "folded": {"normalization_rule_name": "nmt_nfkc_cf"},
    "symbols": {"user_defined_symbols": ["<sep>", "\n", "ｗ"], "control_symbols": ["<ctl>"]},
    "bpe symbols": {"model_type": "bpe", "user_defined_symbols": ["<sep>", "\n", "oo b"]},
    "own ids": {"pad_id": 0, "bos_id": -1, "eos_id": 1, "unk_id": 2, "unk_surface": "?"},
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text"
    path.write_text("\n".join(LINES * 30))
    return path


def trained(corpus: Path, folder: Path, **settings: Any) -> bytes:
    """Return a sentencepiece model."""
    size = {"vocab_size": 400, "hard_vocab_limit": False} | settings
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "m"), minloglevel=2, **size
    )
    return (folder / "m.model").read_bytes()


def archive(path: Path, rows: int, tokenizer: Mapping[str, Any], **members: bytes) -> Path:
    """Write a NeMo archive of a Llama with so many rows; `__` in a name stands for a dot."""
    weights = {
        name: torch.randn(rows, value.shape[1]) if value.shape[0] == 53 else value
        for name, value in core_state().items()
    }
    named = {name.replace("__", "."): data for name, data in members.items()}
    return write_archive(path, CORE | {"tokenizer": tokenizer}, weights, named)


def spm_archive(path: Path, model: bytes, rows: int | None = None) -> Path:
    count = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()
    tokenizer = {"library": "sentencepiece", "model": "nemo:a_tokenizer.model"}
    return archive(path, rows or count, tokenizer, a_tokenizer__model=model)


TEXTS = (*PROBES, *LINES, "<sep>a<sep> <extra_id_1>", "the<ctl>", "foo bar", "w ｗ")


@pytest.mark.parametrize("python", [None, *OTHERS])
def test_folders_have_the_ids_and_texts_of_their_sources(python, corpus, tmp_path):
    requests, wanted = [], []
    for name, settings in TRAINED.items():
        data = trained(corpus, tmp_path, **settings)
        own = sentencepiece.SentencePieceProcessor(model_proto=data)
        source = spm_archive(tmp_path / f"{name}.nemo", data)
        stated = (("start_id", "1"), ("end_id", "1"))
        folder = convert(
            request_of(
                source,
                tmp_path / name,
                given=stated if own.bos_id() < 0 else (),
                output_format="huggingface",
            )
        ).ft_dir
        requests.append({"folder": str(folder), "texts": TEXTS})
        wanted.append([[own.encode(text), own.decode(own.encode(text))] for text in TEXTS])
        ours = load_tokenizer(folder)
        assert [ours.encode(text) for text in TEXTS] == [each for each, _ in wanted[-1]]
        special = {i for i in range(len(own)) if own.is_control(i) or own.is_unknown(i)}
        assert ours.special_ids == special
    for pieces, ids in (("a b ##c", [5, 7, 6]), ("a B ##c", [1, 6])):
        path = tmp_path / "vocab.txt"
        path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces.split()]))
        source = write_model("gpt2", tmp_path / "gpt2")
        folder = written(source, tmp_path / pieces, vocab_path=path)
        requests.append({"folder": str(folder), "texts": ["Ac B"]})
        wanted.append([[ids, "ac b" if ids[0] == 5 else "[UNK] B"]])
    source, slow = byte_pairs(tmp_path)
    texts = [text for text in TEXTS if "<|" not in text]
    folder = written(source, tmp_path / "byte pairs")
    requests.append({"folder": str(folder), "texts": texts})
    wanted.append([[slow(text)["input_ids"], text] for text in texts])
    assert answered(requests, python) == wanted


def test_special_tokens_and_rows_are_those_of_the_model(corpus, tmp_path):
    source = spm_archive(tmp_path / "m.nemo", trained(corpus, tmp_path))
    folder = written(source, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer.decode([2], skip_special_tokens=True) == ""
    small = spm_archive(tmp_path / "small.nemo", trained(corpus, tmp_path), rows=60)
    with pytest.raises(CheckpointMismatchError, match="embedding has 60 rows"):
        convert(request_of(small, tmp_path / "none", output_format="huggingface"))
    assert not (tmp_path / "none" / "huggingface").exists()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "word"}, "model_type word"),
        # Spaces that are a symbol of the user's, and removed as needless at the same time.
        ({"model_type": "bpe", "user_defined_symbols": ["  "]}, "in sentencepiece"),
    ],
)
def test_a_tokenizer_without_an_equal_is_refused_or_left_out(settings, reason, corpus, tmp_path):
    source = spm_archive(tmp_path / "m.nemo", trained(corpus, tmp_path, **settings))
    wanted = request_of(source, tmp_path / "out", output_format="huggingface")
    (problem, *_) = check_conversion(wanted)
    assert reason in problem
    assert "--allow tokenizer" in problem
    with pytest.raises(CheckpointMismatchError):
        convert(wanted)
    assert not wanted.folder.exists()
    done = convert(
        request_of(source, tmp_path / "out", allow=("tokenizer",), output_format="huggingface")
    )
    assert not list(done.ft_dir.glob("tokenizer*"))
    assert any(reason in remark and "left out" in remark for remark in done.remarks)


def test_no_tokenizer_is_given_to_a_model_whose_own_class_changes_it(corpus, tmp_path):
    data = trained(corpus, tmp_path)
    source = write_model("qwen2", tmp_path / "source", vocab_size=400)
    (tmp_path / "m.model").write_bytes(data)
    with pytest.raises(CheckpointMismatchError, match="Qwen2Tokenizer"):
        convert(
            request_of(
                source,
                tmp_path / "out",
                vocab_path=tmp_path / "m.model",
                output_format="huggingface",
            )
        )


def words(count: int = 60, **added: int) -> str:
    """Return a tokenizer.json of words."""
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {"id": index, "content": text, "special": True, "single_word": False,
                 "lstrip": False, "rstrip": False, "normalized": False}
                for text, index in added.items()
            ],
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {
                "type": "WordLevel", "vocab": {f"w{n}": n for n in range(count)}, "unk_token": "w0"
            },
        }
    )  # fmt: skip


def test_a_folder_of_hugging_face_is_copied_whole(tmp_path):
    source = write_model("llama", tmp_path / "source")
    files = {
        "tokenizer.json": words(50, pad=50, picture=60),
        "tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer", "bos_token": "w1"}',
        "special_tokens_map.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tool_use.jinja": "T{{ messages }}",
    }
    (source / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (source / name).write_text(text)
    (source / "LICENSE").write_text("yours")
    done = convert(request_of(source, tmp_path / "out", output_format="huggingface"))
    shards = folder_of(source, tmp_path / "ft", tp_size=2)
    again = written(shards, tmp_path / "again")
    for folder in (done.ft_dir, shards, again):
        assert {name: (folder / name).read_text() for name in files} == files
    assert mentions(done.remarks, "LICENSE")
    assert any("picture" in remark and "pad" not in remark for remark in done.remarks)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("tokenizer.json", words(54), "embedding has 53 rows"),
        ("tokenizer.json", "{}", "holds no vocabulary"),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["a.B", null]}}', "auto_map"),
    ],
)
def test_a_tokenizer_that_cannot_be_the_models_is_refused(name, text, reason, tmp_path):
    source = write_model("llama", tmp_path / "source")
    (source / "tokenizer.json").write_text(words(50))
    (source / name).write_text(text)
    with pytest.raises(CheckpointMismatchError, match=reason):
        convert(request_of(source, tmp_path / "out", output_format="huggingface"))


def test_a_slow_tokenizer_keeps_its_names_and_class(corpus, tmp_path):
    source = write_model("t5", tmp_path / "source", vocab_size=400)
    (source / "spiece.model").write_bytes(trained(corpus, tmp_path))
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    shards = folder_of(source, tmp_path / "ft")
    for each in (source, shards):
        folder = written(each, tmp_path / f"out-{each.name}")
        for name in ("spiece.model", "tokenizer_config.json"):
            assert (folder / name).read_bytes() == (source / name).read_bytes()


def byte_level(*merges: str) -> dict[str, bytes]:
    tokens = [
        *sorted(ByteLevel.alphabet()),
        *(merge.replace(" ", "") for merge in merges),
        "<|endoftext|>",
    ]
    return {
        "a_vocab.json": json.dumps({token: n for n, token in enumerate(tokens)}).encode(),
        "a_merges.txt": "\n".join(["#version: 0.2", *merges, ""]).encode(),
    }


def byte_pairs(folder: Path) -> tuple[Path, Any]:
    """Return a NeMo archive with GPT-2's kind of tokenizer, and the tokenizer in transformers."""
    files = byte_level("t h", "th e", "Ġ the", "l o", "i n")
    tokenizer = {
        "library": "megatron", "type": "GPT2BPETokenizer", "vocab_file": "nemo:a_vocab.json",
        "merge_file": "nemo:a_merges.txt",
    }  # fmt: skip
    members = {name.replace(".", "__"): data for name, data in files.items()}
    for name, data in files.items():
        (folder / name.removeprefix("a_")).write_bytes(data)
    source = archive(folder / "byte pairs.nemo", 262, tokenizer, **members)
    return source, transformers.GPT2Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize(("kind", "ids"), [("Case", [6, 1]), ("LowerCase", [5, 5])])
def test_word_pieces_have_the_case_that_their_source_states(kind, ids, tmp_path):
    data = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nA\n"
    tokenizer = {
        "library": "megatron", "type": f"BertWordPiece{kind}", "vocab_file": "nemo:a_vocab.txt"
    }  # fmt: skip
    source = archive(tmp_path / "m.nemo", 53, tokenizer, a_vocab__txt=data)
    folder = written(source, tmp_path / "out")
    assert load_tokenizer(folder).encode("A \u00c1") == ids


def test_a_list_of_tiktoken_becomes_a_tokenizer(tmp_path):
    data = tiktoken_list(b"th", b"the", b" the", b"he", b" t", b"\xe4\xbd")
    tokenizer = {"library": "tiktoken", "vocab_file": "nemo:a_vocab.json"}
    sizes = {"vocab_size": 264, "tiktoken_num_special_tokens": 3}
    source = archive(tmp_path / "m.nemo", 272, {**tokenizer, **sizes}, a_vocab__json=data)
    folder = written(source, tmp_path / "out")
    shards = folder_of(source, tmp_path / "ft")
    text = "the thethx 你"
    for python in (None, *OTHERS):
        (((ids, back), *_),) = answered([{"folder": str(folder), "texts": [text]}], python)
        assert (ids[:3], back) == ([260, 261, 259], text)
    for each in (folder, shards):
        ours = load_tokenizer(each)
        assert ours.encode("the") == [260]
        assert ours.encode(" the") == [261]
        assert ours.encode("thx") == [259, 3 + ord("x")]
        assert ours.encode("你") == [3 + byte for byte in "你".encode()]
        assert 2 not in ours.encode("</s>")


def test_the_end_of_a_text_is_a_token_by_its_id_alone(tmp_path):
    source, _ = byte_pairs(tmp_path)
    folder = written(source, tmp_path / "out")
    tokenizer, ours = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    assert tokenizer.eos_token_id == 261
    assert ours.special_ids == {261}
    assert ours.encode("<|endoftext|>") == tokenizer("<|endoftext|>")["input_ids"]
    assert 261 not in ours.encode("<|endoftext|>")
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert whole.decode([261], skip_special_tokens=True) == ""
