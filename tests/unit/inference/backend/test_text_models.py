"""The text models without a server: tensors in, tensors out."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.backend.arguments import RequestInputs
from inference.backend.requests import InferRequest, ModelError, Tensors
from inference.backend.tensor_model import TensorModel
from inference.backend.text_models import Postprocessing, Preprocessing, QueryTokenizer
from inference.backend.triton_model import triton_arguments

END = 256  # the first id after the 256 bytes


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, str]:
    from tokenizers.pre_tokenizers import ByteLevel

    version = tmp_path / "model" / "1"
    version.mkdir(parents=True)
    # Identical to the byte, so that an id is its byte.
    order = sorted(ByteLevel.alphabet(), key=lambda c: (ord(c) > 255, ord(c)))
    table = {character: index for index, character in enumerate(order)}
    (version / "vocab.json").write_text(json.dumps(table | {"<end>": END}))
    (version / "merges.txt").write_text("#version: 0.2\n")
    return {
        "model_config": "",
        "model_repository": str(version.parent),
        "model_version": "1",
        "model_name": "model",
    }


def _loaded(model: Any, arguments: dict[str, str], **parameters: str) -> Any:
    values = {"tokenizer_type": "bpe", "end_id": str(END)} | parameters
    config = {"parameters": {key: {"string_value": text} for key, text in values.items()}}
    model.setup(triton_arguments(arguments | {"model_config": json.dumps(config)}))
    return model


def _column(*texts: str | bytes) -> np.ndarray[Any, Any]:
    column = np.empty((len(texts), 1), dtype=object)
    column[:, 0] = [text.encode() if isinstance(text, str) else text for text in texts]
    return column


def _texts(model: Any, rows: list[list[list[int]]], **more: Any) -> list[list[str]]:
    tensors = {"TOKENS_BATCH": np.array(rows, np.uint32)}
    tensors |= {name: np.array(value) for name, value in more.items()}
    return [[text.decode() for text in row] for row in model.run(tensors)["OUTPUT"]]


def test_prompts_are_padded_with_the_end_token(arguments):
    model = _loaded(Preprocessing(), arguments)
    lengths = np.array([[3], [4]], np.uint32)
    outputs = model.run({"QUERY": _column("ab", "c"), "REQUEST_OUTPUT_LEN": lengths})
    ids = model.tokenizer.encode
    assert outputs["INPUT_ID"].tolist() == [ids("ab"), [*ids("c"), END]]
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[2], [1]]
    assert outputs["REQUEST_OUTPUT_LEN"] is lengths


def test_missing_word_lists_are_empty_ones(arguments):
    model = _loaded(Preprocessing(), arguments)
    outputs = model.run({"QUERY": _column("a"), "REQUEST_OUTPUT_LEN": np.array([[1]], np.uint32)})
    assert outputs["BAD_WORDS_IDS"].tolist() == outputs["STOP_WORDS_IDS"].tolist() == [[[0], [-1]]]


def test_missing_input_is_the_clients_error(arguments):
    model = _loaded(Preprocessing(), arguments)
    with pytest.raises(ValueError, match=r"^QUERY: required input is missing$"):
        model.run(RequestInputs(REQUEST_OUTPUT_LEN=np.ones((1, 1), np.uint32)))


def test_every_bad_input_of_a_text_request_is_reported(arguments):
    model = _loaded(Preprocessing(), arguments)
    lengths = np.array([[1]], np.uint32)
    with pytest.raises(ValueError, match=r"QUERY\[0\]: not UTF-8 at byte 1"):
        model.run({"QUERY": _column(b"a\xff"), "REQUEST_OUTPUT_LEN": lengths})
    with pytest.raises(ValueError, match=r"BAD_WORDS_DICT: expected 1 rows") as caught:
        model.run(
            {
                "QUERY": _column("a"),
                "REQUEST_OUTPUT_LEN": lengths,
                "BAD_WORDS_DICT": _column("a", "b"),
                "STOP_WORDS_DICT": _column("a\nb"),
            }
        )
    assert "STOP_WORDS_DICT[0]" in str(caught.value)


def test_an_empty_text_among_others_is_named_and_alone_is_valid(arguments):
    model = _loaded(Preprocessing(), arguments)
    lengths = np.array([[1], [1]], np.uint32)
    with pytest.raises(ValueError, match=r"QUERY\[1\]: an empty text must be sent"):
        model.run({"QUERY": _column("a", ""), "REQUEST_OUTPUT_LEN": lengths})
    outputs = model.run({"QUERY": _column("", ""), "REQUEST_OUTPUT_LEN": lengths})
    assert outputs["INPUT_ID"].shape == (2, 0)


def test_texts_that_would_keep_others_waiting_are_refused(arguments):
    model = _loaded(Preprocessing(), arguments)

    def problem(*texts: str, words: str = "") -> str:
        lengths = np.ones((len(texts), 1), np.uint32)
        tensors = {"QUERY": _column(*texts), "REQUEST_OUTPUT_LEN": lengths}
        with pytest.raises(ValueError, match="at most") as caught:
            model.run(tensors | {"STOP_WORDS_DICT": _column(*[words] * len(texts))})
        return str(caught.value)

    mebibyte = 1 << 20
    assert problem("a", "b" * (mebibyte + 1)) == "QUERY[1]: 1048577 bytes; 1048576 at most"
    assert problem(*["b" * mebibyte] * 4, "c").startswith("QUERY: 4194305 bytes in all; 4194304 at")
    assert problem("a", words="b" * 65537) == "STOP_WORDS_DICT[0]: 65537 bytes; 65536 at most"
    tokens = np.zeros((1, 1, (8 << 20) + 1), np.uint8)
    with pytest.raises(ValueError, match="TOKENS_BATCH: 8388609 tokens; 8388608 at most"):
        _loaded(Postprocessing(), arguments).run({"TOKENS_BATCH": tokens})


def test_encoder_prompts_end_with_the_end_token_where_the_model_wants_it(
    arguments,
):
    model = _loaded(QueryTokenizer(), arguments, append_end_id="1")
    outputs = model.run({"query": _column("ab")})
    assert outputs["input_ids"].tolist() == [[*model.tokenizer.encode("ab"), END]]
    assert outputs["request_input_len"].tolist() == [[3]]


def test_answers_of_an_encoder_decoder_stand_alone(arguments):
    model = _loaded(Postprocessing(), arguments, output_holds_prompt="0")
    a, b = model.tokenizer.encode("ab")
    rows = [[[a, b, END, 0]], [[b, END, END, 0]]]
    assert _texts(model, rows, sequence_length=[[3], [2]]) == [["ab"], ["b"]]


def test_text_ends_with_the_answer_not_with_the_filling(arguments):
    model = _loaded(Postprocessing(), arguments)
    a, b, c = model.tokenizer.encode("abc")
    rows = [[[a, b, c, END, END]], [[a, c, END, END, END]]]
    assert _texts(model, rows, RESPONSE_INPUT_LENGTHS=[[2], [1]]) == [["abc"], ["ac"]]


def test_each_beam_has_its_own_text(arguments):
    model = _loaded(Postprocessing(), arguments)
    a, b, c = model.tokenizer.encode("abc")
    rows = [[[a, b, END], [a, c, c]]]
    assert _texts(model, rows, RESPONSE_INPUT_LENGTHS=[[1, 1]]) == [["ab", "acc"]]


def test_end_token_inside_the_prompt_does_not_cut_it(arguments):
    model = _loaded(Postprocessing(), arguments)
    a, b = model.tokenizer.encode("ab")
    assert _texts(model, [[[a, END, b, END]]], REQUEST_INPUT_LEN=[[2]]) == [["a<end>b"]]


def test_answers_end_where_the_model_says_even_after_other_end_tokens(
    arguments,
):
    model = _loaded(Postprocessing(), arguments)
    a, b, c = model.tokenizer.encode("abc")
    rows = [[[a, b, END, c, c]], [[a, END, b, c, c]]]
    # The padded prompt has 2 tokens; the second row's own has 1, and two new ones.
    lengths = {"RESPONSE_INPUT_LENGTHS": [[2], [1]], "sequence_length": [[4], [4]]}
    assert _texts(model, rows, **lengths) == [["ab<end>c"], ["a<end>b"]]
    strict = _loaded(Postprocessing(), arguments, strict_lengths="1")
    lengths["sequence_length"] = [[4], [3]]
    assert _texts(strict, rows, **lengths) == [["ab<end>c"], ["a<end>b"]]


def test_an_answer_ends_before_any_of_the_end_tokens(arguments):
    a, b, other = _loaded(Postprocessing(), arguments).tokenizer.encode("abc")
    model = _loaded(Postprocessing(), arguments, end_ids=f"{END},{other}")
    rows = [[[a, b, other, END, END]]]  # END fills the row
    assert _texts(model, rows, RESPONSE_INPUT_LENGTHS=[[1]]) == [["ab"]]
    lengths = {"RESPONSE_INPUT_LENGTHS": [[1]], "sequence_length": [[3]]}
    assert _texts(model, rows, **lengths) == [["ab"]]
    with pytest.raises(ValueError, match="parameter end_ids='1;2' must be token IDs"):
        _loaded(Postprocessing(), arguments, end_ids="1;2")


def test_without_prompt_length_only_trailing_end_tokens_go(arguments):
    model = _loaded(Postprocessing(), arguments)
    a, b = model.tokenizer.encode("ab")
    assert _texts(model, [[[a, END, b, END, END]]]) == [["a<end>b"]]


def test_answer_only_keeps_the_blank_the_answer_starts_with(arguments):
    model = _loaded(Postprocessing(), arguments, answer_only="1")
    ids = model.tokenizer.encode("up we go")
    assert _texts(model, [[[*ids, END]]], RESPONSE_INPUT_LENGTHS=[[2]]) == [[" we go"]]


def test_start_token_that_preprocessing_adds_is_not_part_of_the_text(
    arguments,
):
    folder = Path(arguments["model_repository"]) / "1"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": True, "bos_token": "<end>"})
    )
    before = _loaded(Preprocessing(), arguments)
    lengths = np.array([[3]], np.uint32)
    outputs = before.run({"QUERY": _column("ab"), "REQUEST_OUTPUT_LEN": lengths})
    ids = outputs["INPUT_ID"].tolist()[0]
    assert ids == [END, *before.tokenizer.encode("ab")]
    c = before.tokenizer.encode("c")
    for only, expected in (("0", "abc"), ("1", "c")):
        after = _loaded(Postprocessing(), arguments, answer_only=only)
        rows = [[[*ids, *c, END]]]
        assert _texts(after, rows, RESPONSE_INPUT_LENGTHS=[[3]]) == [[expected]]
        assert _texts(after, rows) == [["abc"]]


def test_streamed_frames_show_whole_characters_until_the_answer_is_complete(
    arguments,
):
    model = _loaded(Postprocessing(), arguments, streaming="1")
    a, *character = model.tokenizer.encode("a\u4f60")
    frames = [[a, *character[:n], *[END] * (4 - n)] for n in range(4)]
    lengths = {"RESPONSE_INPUT_LENGTHS": [[1]]}
    shown = [_texts(model, [[frame]], **lengths)[0][0] for frame in frames]
    assert shown == ["a", "a", "a", "a\u4f60"]
    # Ended in the middle of a character: nothing will complete it.
    cut = _texts(model, [[frames[2]]], **lengths, IS_FINISHED=[[True]])
    assert cut == [["a\ufffd"]]


@pytest.mark.parametrize("name", ["IS_FINISHED", "sequence_length", "RESPONSE_INPUT_LENGTHS"])
def test_an_input_of_another_shape_than_the_tokens_is_named(arguments, name):
    values = {"RESPONSE_INPUT_LENGTHS": [[1]]} | {name: [[1, 1, 1]]}
    with pytest.raises(ValueError, match=rf"{name}: expected shape \[1, 2\], got \[1, 3\]"):
        _texts(_loaded(Postprocessing(), arguments), [[[97], [98]]], **values)


@pytest.mark.parametrize(
    ("value", "words", "code"),
    [(0, "it is lost", "INTERNAL"), (-1, "it is negative", None)],
)
def test_a_request_that_fails_has_an_answer_of_its_own(value, words, code):
    class Failing(TensorModel):
        def run(self, tensors: Tensors) -> dict[str, np.ndarray[Any, Any]]:
            if tensors["x"] < 0:
                raise ValueError("it is negative")
            if tensors["x"] == 0:
                raise RuntimeError("it is lost")
            return {"OUTPUT": np.array([1])}

    async def ask(value: int) -> Any:
        request = InferRequest({"x": np.array(value)})
        return await Failing().answer_request(request)

    with pytest.raises(ModelError) as caught:
        asyncio.run(ask(value))
    assert (str(caught.value), caught.value.code) == (words, code or "INVALID_ARGUMENT")
    assert asyncio.run(ask(1)) == {"OUTPUT": [1]}


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("too long"), "INVALID_ARGUMENT"), (OSError("lost"), "INTERNAL")]
)
def test_a_large_request_that_fails_in_its_process_has_an_answer_too(error, code):
    async def fails(*_: object) -> Any:
        raise error

    model = TensorModel()
    model.run_in_worker = fails
    with pytest.raises(ModelError, match=str(error)) as caught:
        asyncio.run(model.answer_request(InferRequest({"x": np.zeros(1 << 20)})))
    assert caught.value.code == code


def test_parameters_that_are_no_numbers_stop_the_load(arguments):
    with pytest.raises(ValueError, match="parameter end_id='x' must be a whole number"):
        _loaded(Postprocessing(), arguments, end_id="x")
    with pytest.raises(ValueError, match="parameter answer_only='2' must be 0 or 1"):
        _loaded(Postprocessing(), arguments, answer_only="2")


def _word_pieces(arguments: dict[str, str], *, longest_word: int) -> None:
    """Replace the tokenizer by WordPiece, which knows a single letter."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.pre_tokenizers import BertPreTokenizer

    vocab = {"[UNK]": 0, "a": 1, "##a": 2, "b": 3}
    backend = Tokenizer(WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=longest_word))
    backend.pre_tokenizer = BertPreTokenizer()
    backend.save(str(Path(arguments["model_repository"]) / "1" / "tokenizer.json"))


def test_words_that_take_quadratic_time_are_bounded(arguments):
    _word_pieces(arguments, longest_word=100)
    model = _loaded(QueryTokenizer(), arguments, tokenizer_type="hf", end_id="0")
    hostile = ("a" * 100 + " ") * 648  # the most that a text may have
    began = time.monotonic()
    lengths = model.run({"query": _column(hostile)})["request_input_len"]
    assert time.monotonic() - began < 20  # 0.8 s on a quiet machine
    assert lengths.tolist() == [[64800]]
    with pytest.raises(ValueError, match=r"query\[0\]: 65550 bytes; 65536 at most"):
        model.run({"query": _column(hostile + "a" * 102)})
    _word_pieces(arguments, longest_word=10**6)
    with pytest.raises(ValueError, match="max_input_chars_per_word=1000000"):
        _loaded(QueryTokenizer(), arguments, tokenizer_type="hf", end_id="0")


def test_rows_that_are_padded_to_a_long_one_are_bounded(arguments):
    model = _loaded(QueryTokenizer(), arguments)
    with pytest.raises(ValueError, match="query: 9 rows of up to 1048576 tokens; 8388608 at most"):
        model.run({"query": _column("a" * (1 << 20), *"bcdefghi")})
