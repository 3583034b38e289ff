"""Large files reach the disk whole, whatever their sizes and whatever the file system can do."""

import contextlib
import errno
import mmap
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from foundations.files import disk
from foundations.files.disk import SequentialFile, check_space

BLOCK = disk.BLOCK_BYTES


def write(path: Path, sizes: list[int], *, aligned: bool = True) -> bytes:
    """Write chunks of these sizes from one buffer; return what they hold."""
    buffer = mmap.mmap(-1, max(sizes) + 1)
    view = memoryview(buffer)[0 if aligned else 1 :]
    expected = b""
    with contextlib.closing(SequentialFile(path, sum(sizes))) as file:
        for number, size in enumerate(sizes):
            data = random.Random(number).randbytes(size)
            view[:size] = data
            file.write(view[:size])
            expected += data
        assert not path.exists() or path.read_bytes() != expected
        file.finish()
    return expected


@pytest.mark.parametrize(
    "sizes",
    [
        [100],
        [1 << 20],
        [BLOCK * 300, BLOCK * 300],
        [BLOCK * 300, BLOCK * 300 + 17],
        [BLOCK * 300 + 17, BLOCK * 300 + 5, 3],
        [1 << 21, 1],
        [3, 1 << 21],
    ],
)
@pytest.mark.parametrize("aligned", [True, False])
def test_files_hold_the_written_bytes(tmp_path, sizes, aligned):
    expected = write(tmp_path / "x", sizes, aligned=aligned)
    assert (tmp_path / "x").read_bytes() == expected


def test_a_file_system_without_direct_writes_will_do(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_O_DIRECT", 0)
    expected = write(tmp_path / "x", [BLOCK * 300, BLOCK * 300])
    assert (tmp_path / "x").read_bytes() == expected


def test_an_existing_file_is_replaced(tmp_path):
    (tmp_path / "x").write_bytes(b"z" * (1 << 22))
    expected = write(tmp_path / "x", [1 << 20])
    assert (tmp_path / "x").read_bytes() == expected


def test_an_error_names_the_file(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(OSError, match=str(tmp_path / "x" / "y")):
        SequentialFile(tmp_path / "x" / "y", 4)


def test_space_is_judged_where_the_folder_will_be(tmp_path):
    assert check_space(tmp_path / "not" / "yet", 1) is None
    problem = check_space(tmp_path / "not" / "yet", 1 << 62)
    assert problem is not None
    assert f"the conversion needs {1 << 62:,}" in problem


@pytest.mark.parametrize("named", [True, False])
def test_full_disk_names_its_mount_and_the_remedy(tmp_path, monkeypatch, named):
    path = tmp_path / "not" / "there.bin"
    error = OSError(errno.ENOSPC, "No space left on device", str(path) if named else None)
    if not named:
        assert str(disk.full_disk(error, path)).startswith(
            "a disk is full (No space left on device)"
        )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    text = disk.full_disk(error, path)
    assert text is not None
    mount = text.removeprefix("the disk mounted at ").partition(" is full: ")[0]
    assert os.path.ismount(mount)
    assert tmp_path.is_relative_to(mount)
    assert f"{path} cannot be written" in text
    assert "free space there, or choose a folder on another disk" in text
    assert disk.full_disk(OSError(errno.EACCES, "no", str(path)), path) is None
