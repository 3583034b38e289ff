"""Indexing the numbered .npz parts of a GPT-J release."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

from export_scripts.checkpoints.jax import open_jax, step_directory
from foundations.errors import CheckpointMismatchError
from tests.arrays import loaded

LAYERS = 12
ARRAYS = 6 + 10 * LAYERS


def write_release(folder: Path, *, shards: int = 2, arrays: int = ARRAYS, parts: int = 2) -> Path:
    """Write arrays whose only value encodes their shard and place in the sequence."""
    step = folder / "step_7"
    for shard in range(shards):
        values = [np.full((3,), 1000 * shard + i, np.float32) for i in range(arrays)]
        (step / f"shard_{shard}").mkdir(parents=True)
        cut = arrays // parts
        for part in range(parts):
            end = None if part == parts - 1 else (part + 1) * cut
            np.savez(step / f"shard_{shard}" / f"{part}.npz", *values[part * cut : end])
    return step


def test_arrays_are_named_by_their_place_with_layers_sorted_as_text(tmp_path):
    index = open_jax(write_release(tmp_path))

    def first(key: str, shard: int = 0) -> float:
        return float(loaded(index.tensors[key][shard])[0])

    assert first("wte.bias") == 0
    assert first("h.0.q.weight") == 2
    assert first("h.0.v.weight") == 3
    assert first("h.1.q.weight") == 12
    assert first("h.10.q.weight") == 22  # after layer 1, before layer 2
    assert first("h.2.q.weight") == 42
    assert first("ln_f.weight", shard=1) == 1000 + ARRAYS - 1
    assert len(index.tensors) == ARRAYS


def test_two_byte_void_arrays_are_bfloat16(tmp_path):
    import torch

    step = tmp_path / "step_1" / "shard_0"
    step.mkdir(parents=True)
    bits = torch.tensor([1.5, -2.0], dtype=torch.bfloat16).view(torch.int16).numpy()
    np.savez(step / "0.npz", *[bits.view("V2")] * 16)

    tensor = loaded(open_jax(tmp_path).tensors["wte.bias"][0])

    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [1.5, -2.0]


def test_folder_above_the_step_is_accepted_and_says_which_step(tmp_path):
    write_release(tmp_path)
    index = open_jax(tmp_path)
    assert index.remarks == (f"step_7 of {tmp_path} is read",)


def test_other_folders_are_not_a_release(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert step_directory(tmp_path) is None


@pytest.mark.parametrize(
    ("form", "lost", "words"),
    [
        ({"shards": 3}, "shard_1/0.npz", "lacks shard_1 of 3 shards"),
        ({"parts": 3}, "shard_1/1.npz", r"shard_1 lacks 1\.npz"),
        ({"arrays": ARRAYS - 1}, "", f"shard_0 holds {ARRAYS - 1} arrays"),
    ],
)
def test_missing_parts_are_named(form, lost, words, tmp_path):
    step = write_release(tmp_path, **form)
    if lost:
        (step / lost).unlink()
    with pytest.raises(CheckpointMismatchError, match=words):
        open_jax(step)


def test_a_shard_that_no_release_has_is_refused(tmp_path):
    step = write_release(tmp_path)
    (step / "shard_1").rename(step / "shard_1999999999")
    with pytest.raises(CheckpointMismatchError, match="has a shard 1999999999"):
        open_jax(step)


def test_cut_off_file_is_named(tmp_path):
    step = write_release(tmp_path)
    file = step / "shard_0" / "1.npz"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(CheckpointMismatchError, match=r"1\.npz is truncated or damaged"):
        open_jax(step)


@pytest.mark.parametrize(
    ("write", "array", "words"),
    [
        (np.savez, np.array([{}], dtype=object), r"arr_0\.npy has type '\|O'"),
        (np.savez_compressed, np.zeros(3, np.float32), "is compressed"),
    ],
    ids=["objects", "compressed"],
)
def test_arrays_of_other_forms_are_refused(write, array, words, tmp_path):
    step = tmp_path / "step_1" / "shard_0"
    step.mkdir(parents=True)
    write(step / "0.npz", array)
    with pytest.raises(CheckpointMismatchError, match=words):
        open_jax(tmp_path)


@pytest.mark.parametrize(
    ("header", "reported"),
    [
        (b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}", "has type .*'a'"),
        (b"1+" * 20_000 + b"1", "has a damaged header"),
        (b"-" * 60_000 + b"1", "has a damaged header"),
        (b"{'descr': '<f4', ", "has a damaged header"),
        (b"  a\n b\n", "has a damaged header"),
        (b"{'descr': ('i1', (2,)), 'fortran_order': False, 'shape': (2,)}", "has type .*i1"),
    ],
    ids=["a table", "a sum", "signs", "cut off", "indented", "arrays in an array"],
)
def test_headers_of_something_else_are_refused(tmp_path, header, reported):
    step = write_release(tmp_path, shards=1, parts=1)
    with zipfile.ZipFile(step / "shard_0" / "0.npz", "w") as archive:
        length = len(header).to_bytes(2, "little")
        archive.writestr("arr_0.npy", b"\x93NUMPY\x01\x00" + length + header)
    with pytest.raises(CheckpointMismatchError, match=rf"arr_0\.npy {reported}"):
        open_jax(step)


def test_model_configuration_next_to_the_step_is_read(tmp_path):
    write_release(tmp_path)
    (tmp_path / "6B_roto_256.json").write_text('{"n_heads": 16, "pe_rotary_dims": 64}')
    assert open_jax(tmp_path).config == {"n_heads": 16, "pe_rotary_dims": 64}
