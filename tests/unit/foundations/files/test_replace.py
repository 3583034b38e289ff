"""Files replaced in one step."""

import errno
import os
from pathlib import Path

import pytest

from foundations.files.replace import read_file, replace_file


def test_content_replaces_the_old_file(tmp_path):
    path = tmp_path / "report.md"
    replace_file(path, "first")
    replace_file(path, "grün")
    assert path.read_bytes() == "grün".encode()
    assert list(tmp_path.iterdir()) == [path]


def out_of_space(self: Path, target: Path) -> None:
    assert self.parent == target.parent
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_error_keeps_the_old_file_and_leaves_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    replace_file(path, b"old")
    monkeypatch.setattr(Path, "replace", out_of_space)
    with pytest.raises(OSError, match="No space left") as caught:
        replace_file(path, b"new")
    assert caught.value.filename == str(path)  # a full disk is reported with the file
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_another_machine_replaces_is_opened_again(tmp_path, monkeypatch):
    path, fstat = tmp_path / "state", os.fstat
    path.write_bytes(b"new")

    def stale(descriptor: int) -> os.stat_result:
        if losses:
            raise losses.pop()
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", stale)
    losses = [OSError(errno.ESTALE, "Stale file handle")]
    assert read_file(path) == b"new"
    losses += [OSError(errno.ESTALE, "Stale file handle") for _ in range(4)]
    with pytest.raises(OSError, match=f"Stale file handle: '{path}'"):
        read_file(path)
