"""Checkpoints in a file for each training rank: NeMo's and Megatron-LM's."""

from pathlib import Path

from tests.conversions import folder_of
from tests.tiny import gpt_tensors, write_nemo


def contents(source: Path, out: Path) -> dict[str, bytes]:
    folder = folder_of(source, out, tp_size=2)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_names_behind_mixed_precision_wrappers_are_known(tmp_path):
    tensors = gpt_tensors()
    wrapped = {
        name.replace("model.", "model.module.", 1): tensor for name, tensor in tensors.items()
    }
    plain = contents(write_nemo(tmp_path / "a.nemo", tensors, tp=2, pp=2), tmp_path / "a")
    assert contents(write_nemo(tmp_path / "b.nemo", wrapped, tp=2, pp=2), tmp_path / "b") == plain
