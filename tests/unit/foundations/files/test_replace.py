"""Files replaced in one step."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from foundations.files.replace import replace_file


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
