"""Word lists, encoding and decoding against vectors recorded from the reference implementation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.backend.text_models import pad_rows, split_words, word_list_tensor
from inference.backend.tokenizer import Tokenizer, load_tokenizer
from tests.conftest import material


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return load_tokenizer(material("data", "gpt2_bpe"), kind="bpe")


def _vectors(shared: Path, name: str) -> Any:
    return json.loads((shared / "golden" / "wordlists" / name).read_text())


def test_every_recorded_word_list_gives_the_recorded_tensor(shared, gpt2):
    cases = _vectors(shared, "gpt2.json")["cases"]
    assert len(cases) >= 20
    for case in cases:
        tensor = word_list_tensor(case["csv"], gpt2, name="STOP_WORDS_DICT")
        assert tensor.dtype == np.int32
        assert tensor.tolist() == case["tensor"], case["name"]
        assert [split_words(text) for text in case["csv"]] == case["fields"], case["name"]


def test_every_recorded_bad_record_is_refused_and_the_row_named(shared, gpt2):
    for case in _vectors(shared, "gpt2_errors.json")["cases"]:
        with pytest.raises(ValueError, match=r"BAD_WORDS_DICT\[1\]"):
            word_list_tensor(["", *case["csv"]], gpt2, name="BAD_WORDS_DICT")


def test_every_recorded_text_encodes_to_the_recorded_ids(shared, gpt2):
    for case in _vectors(shared, "gpt2_encode.json")["encode"]:
        assert gpt2.encode(case["text"]) == case["ids"], case["text"]


def test_every_recorded_id_list_decodes_to_the_recorded_text(shared, gpt2):
    for case in _vectors(shared, "gpt2_encode.json")["decode"]:
        assert gpt2.decode(case["ids"]) == case["text"], case["ids"]


def test_recorded_prompts_are_padded_as_recorded(shared, gpt2):
    case = _vectors(shared, "gpt2_preprocessing.json")
    ids, lengths = pad_rows([gpt2.encode(text) for text in case["query"]], pad_id=case["pad_id"])
    assert ids.dtype == lengths.dtype == np.uint32
    assert ids.tolist() == case["input_id"]
    assert lengths.tolist() == case["request_input_len"]


def test_sample_model_vocabulary_reproduces_its_recorded_prompts(shared):
    tokenizer = load_tokenizer(shared / "sample_model")
    for case in json.loads((shared / "sample_model" / "greedy.json").read_text()):
        assert tokenizer.encode(case["prompt"]) == case["input_ids"]
        assert tokenizer.decode(case["greedy_output_ids"]) == case["greedy_text"]
