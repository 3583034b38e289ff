"""Archives and pickles made without torch are those that torch reads."""

import argparse
import io
import zipfile

import pytest
import torch

from export_scripts.conversion.torch_archive import Archive, PickledObject, StoredValues
from foundations.files.checksum import crc32


def tensor(shape: tuple[int, ...], kind: str = "torch.FloatStorage") -> PickledObject:
    values = StoredValues(kind, torch.Size(shape).numel())
    strides = torch.empty(shape, device="meta").stride()
    rest = (0, shape, tuple(strides), False, PickledObject("collections.OrderedDict"))
    return PickledObject("torch._utils._rebuild_tensor_v2", (values, *rest))


@pytest.mark.parametrize("offset", [0, 1, 63, 5000])
def test_torch_loads_a_tensor(offset, tmp_path):
    values = torch.randn(3, 5, dtype=torch.bfloat16)
    raw = values.view(torch.uint8).numpy().tobytes()
    archive = Archive(tensor((3, 5), "torch.BFloat16Storage"), len(raw), offset)
    before, after = archive.parts(crc32(raw))
    assert before == archive.parts()[0]
    assert len(after) == len(archive.parts()[1])
    assert (offset + len(before)) % 64 == 0
    whole = before + raw + after
    assert torch.equal(torch.load(io.BytesIO(whole), weights_only=True), values)
    path = tmp_path / "tensor.pt"
    path.write_bytes(whole)
    assert torch.equal(torch.load(path, mmap=True), values)
    assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize(
    "value",
    [
        [None],
        {"a": 1, "b": [True, "text", 1e-5, -(1 << 40)], "c": (1, (2, ())), "d": {}, "e": []},
    ],
)
def test_torch_loads_plain_values(value):
    data = b"".join(Archive(value).parts())
    assert torch.load(io.BytesIO(data), weights_only=True) == value


def test_an_object_has_its_state():
    value = PickledObject("argparse.Namespace", state={"layers": 2, "sizes": [1, None]})
    loaded = torch.load(io.BytesIO(b"".join(Archive(value).parts())), weights_only=False)
    assert loaded == argparse.Namespace(layers=2, sizes=[1, None])


def test_a_tensor_beyond_four_gib_is_found(tmp_path):
    count = (5 << 30) // 4
    before, after = Archive(tensor((count,)), 4 * count).parts()
    path = tmp_path / "large.pt"
    with path.open("wb") as file:  # with a hole in place of the values
        file.write(before)
        file.seek(4 * count, io.SEEK_CUR)
        file.write(after)
    info = zipfile.ZipFile(path).getinfo("archive/data/0")
    assert info.file_size == 4 * count
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded.shape == (count,)
    assert loaded[-1] == 0
