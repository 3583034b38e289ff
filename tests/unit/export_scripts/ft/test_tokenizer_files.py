"""Tokenizer files: which of a checkpoint's stay next to those that a user names."""

import pytest

from export_scripts.ft.tokenizer_files import is_replaced

FOUND = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([], FOUND),
        (["tokenizer.json"], ["tokenizer_config.json"]),
        (["vocab.json"], ["tokenizer_config.json", "merges.txt"]),
        (["vocab.json", "merges.txt"], ["tokenizer_config.json"]),
        (["tokenizer.model"], ["tokenizer_config.json"]),
        (["vocab.txt"], ["tokenizer_config.json"]),
    ],
)
def test_no_other_tokenizer_can_be_taken_in_place_of_the_given_one(given, kept):
    assert [name for name in FOUND if not is_replaced(name, given)] == kept
