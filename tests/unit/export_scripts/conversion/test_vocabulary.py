"""Rows that training added to a vocabulary are left out, on every way out."""

import pytest
import torch

from tests.conversions import contents, written
from tests.json_files import read_json, write_json
from tests.tiny_huggingface import read_tensors
from tests.tiny_megatron_core import core_state
from tests.tiny_transformers import write_model
from tests.unit.export_scripts.checkpoints.test_distributed import converted
from tests.unit.export_scripts.checkpoints.test_megatron_layers import write_parts

GIVEN = (("start_id", "1"), ("end_id", "2"))
ROWS, KEPT = 64, 40


def cut(state: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    return {
        name: tensor[:KEPT] if len(tensor) == rows else tensor for name, tensor in state.items()
    }


@pytest.mark.parametrize("name", ["llama", "gptj", "gpt2", "t5", "phi"])
def test_a_folder_has_the_first_rows_alone(name, tmp_path):
    source = write_model(name, tmp_path / "model", vocab_size=ROWS)
    folder = written(source, tmp_path / "out", vocabulary=str(KEPT))
    found, whole = read_tensors(folder), read_tensors(source)
    assert found.keys() <= whole.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, whole[key][: len(tensor)])
        assert len(tensor) == (KEPT if len(whole[key]) == ROWS else len(whole[key])), key
    assert read_json(folder / "config.json")["vocab_size"] == KEPT


@pytest.mark.parametrize("tp_size", [1, 2])
def test_shards_of_training_ranks_have_the_first_rows_alone(tmp_path, tp_size):
    """The second rank of training has most of its rows left out."""
    torch.manual_seed(3)
    state = {name.removeprefix("model."): tensor for name, tensor in core_state(layers=4).items()}
    sources = [
        write_parts(tmp_path / name, each, (4,), 1, num_layers=4)
        for name, each in (("whole", state), ("cut", cut(state, 53)))
    ]
    found = converted(sources[0], tmp_path / "out", tp_size, given=GIVEN, vocabulary=str(KEPT))
    expected = converted(sources[1], tmp_path / "expected", tp_size, given=GIVEN)
    assert contents(found) == contents(expected)


def test_the_size_may_be_the_tokenizer_s(tmp_path):
    source = write_model("gpt2", tmp_path / "model", vocab_size=ROWS)
    words = {f"w{number}": number for number in range(KEPT)}
    write_json(source / "vocab.json", words)
    (source / "merges.txt").write_text("#version: 0.2\n")
    folder = written(source, tmp_path / "out", vocabulary="tokenizer", allow=("tokenizer",))
    assert read_json(folder / "config.json")["vocab_size"] == KEPT
    expected = rf"expected from {KEPT} \(IDs of the tokenizer\) to {ROWS}"
    with pytest.raises(ValueError, match=expected):
        written(source, tmp_path / "less", vocabulary=str(KEPT - 1), allow=("tokenizer",))


@pytest.mark.parametrize("stated", ["0", "-3", "many", "tokenizer", str(ROWS + 1)])
def test_other_sizes_are_refused(stated, tmp_path):
    source = write_model("llama", tmp_path / "model", vocab_size=ROWS)
    with pytest.raises(ValueError, match=f"--vocabulary={stated}"):
        written(source, tmp_path / "out", vocabulary=stated)
