"""Bytes that changed since a checkpoint was saved are noticed where its archive has checksums."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export_scripts.checkpoints.base import FileMaps
from export_scripts.checkpoints.jax import open_jax
from export_scripts.checkpoints.pt_archive import read_torch_file
from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.ft.reader import FTReader
from foundations.errors import CheckpointMismatchError
from tests.arrays import in_one_file
from tests.tiny import NEMO, gpt_tensors, write_nemo

DENSE = "encoder.layers.0.self_attention.dense.weight"
NORM = "encoder.final_layernorm.weight"


def flip(path: Path, data: bytes) -> None:
    """Flip a bit in the middle of the only place in a file where `data` stands."""
    content = bytearray(path.read_bytes())
    assert content.count(data) == 1
    content[content.index(data) + len(data) // 2] ^= 1
    path.write_bytes(content)


def stored(name: str) -> bytes:
    return gpt_tensors()[NEMO + name].numpy().tobytes()


def request(source: Path, **fields: Any) -> ConversionRequest:
    return ConversionRequest(source, source.parent / "out", 1, "fp32", processes=2, **fields)


@pytest.fixture
def without_checksums() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


def test_every_flipped_tensor_is_named(tmp_path):
    source = write_nemo(tmp_path / "x.nemo")
    flip(source, stored(DENSE))
    flip(source, stored(NORM))
    with pytest.raises(CheckpointMismatchError) as caught:
        convert(request(source))
    first, second = sorted(caught.value.problems)
    assert first.startswith(
        f"model.final_layernorm.weight: {NEMO}{NORM} in {source} does not match"
    )
    assert second.startswith(f"model.layers.0.attention.dense.weight: {NEMO}{DENSE} in")
    assert not (tmp_path / "out").exists()


def test_a_flipped_tensor_is_converted_where_it_is_allowed_by_name(tmp_path):
    source = write_nemo(tmp_path / "x.nemo")
    flip(source, stored(NORM))
    done = convert(request(source, allow=("model.final_layernorm.weight",)))
    found = FTReader(done.ft_dir).read("model.final_layernorm.weight")
    assert int((found != gpt_tensors()[NEMO + NORM]).sum()) == 1


@pytest.mark.usefixtures("without_checksums")
def test_archives_saved_without_checksums_are_converted(tmp_path):
    done = convert(request(write_nemo(tmp_path / "x.nemo")))
    found = FTReader(done.ft_dir).read("model.final_layernorm.weight")
    assert torch.equal(found, gpt_tensors()[NEMO + NORM])


def test_a_flipped_pickle_is_refused(tmp_path):
    torch.save({"weight": torch.ones(3)}, tmp_path / "x.pt")
    flip(tmp_path / "x.pt", b"weight")
    with pytest.raises(CheckpointMismatchError, match=r"data\.pkl does not match its checksum"):
        read_torch_file(tmp_path / "x.pt")


def test_tensors_that_share_a_storage_share_its_checksum(tmp_path, monkeypatch):
    monkeypatch.setattr("export_scripts.checkpoints.base._CHECKED_BYTES", 10_000)
    whole = torch.randn(100, 100)
    torch.save({"top": whole[:50], "rest": whole[50:]}, tmp_path / "x.pt")
    tree = read_torch_file(tmp_path / "x.pt")
    assert all(FileMaps().is_intact(tensor) for tensor in tree.values())
    flip(tmp_path / "x.pt", whole.numpy().tobytes())
    assert not any(FileMaps().is_intact(tensor) for tensor in tree.values())


def test_a_flipped_array_of_a_jax_release_is_noticed(tmp_path):
    shard = tmp_path / "step_1" / "shard_0"
    shard.mkdir(parents=True)
    arrays = [np.random.default_rng(i).random(50, np.float32) for i in range(16)]
    np.savez(shard / "0.npz", *arrays)
    flip(shard / "0.npz", arrays[3].tobytes())
    index = open_jax(tmp_path)
    maps = FileMaps()
    parts = {key: in_one_file(part) for key, (part,) in index.tensors.items()}
    damaged = [key for key, part in parts.items() if not maps.is_intact(part)]
    assert damaged == ["h.0.v.weight"]
