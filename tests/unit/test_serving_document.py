"""The promises of docs/serving.md: its commands run, its table lists the models."""

import json
import re

import pytest

from export_scripts.families.table import FAMILIES
from export_scripts.triton.repository import is_generative
from export_scripts.triton.signature import MODEL_SIGNATURES
from inference.server.tensors import file_tensors
from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "serving.md").read_text()
# Rows of the table, by the model_type that each serves.
ROWS = {
    "GPT, OPT, BLOOM": "GPT",
    "GPT-J": "GPT-J",
    "GPT-NeoX": "GPT-NeoX",
    "Llama-style": "Llama",
    "T5": "T5",
    "T5-Encoder": "T5-Encoder",
    "BERT": "bert",
    "interactive GPT": "GPT",
}


def table() -> dict[str, list[str]]:
    found = re.search(r"<!-- served how -->\n(.*?)\n<!-- end -->", TEXT, re.DOTALL)
    assert found is not None
    rows = [line.strip("| ").split(" | ") for line in found[1].splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def test_every_kind_of_model_has_a_row():
    assert list(table()) == list(ROWS)
    assert set(ROWS.values()) == set(MODEL_SIGNATURES)


@pytest.mark.parametrize("row", ROWS)
def test_engines_and_streaming_are_those_of_the_model(row):
    _, engines, streams, *_ = table()[row]
    families = [each for each in FAMILIES.values() if each.model_type == ROWS[row]]
    assert families
    on_ft = all(family.ft_backend for family in families)
    assert engines == ("pytorch, fastertransformer" if on_ft else "pytorch")
    assert streams == ("yes" if is_generative(ROWS[row]) else "no")


def test_request_files_of_the_document_can_be_read():
    files = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)]
    assert len(files) == 2
    for each in files:
        tensors = file_tensors(each["request"])
        assert {tensor.ndim for tensor in tensors.values()} == {3}
