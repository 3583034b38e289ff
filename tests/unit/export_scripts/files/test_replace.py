"""Files replaced in one step."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from export_scripts.files.replace import replace_file, replacing


def test_content_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    replace_file(path, "first")
    replace_file(path, "grün")
    assert path.read_bytes() == "grün".encode()
    assert list(tmp_path.iterdir()) == [path]


def fail_half_way(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"half of the new")
        raise OSError("disk full")


def test_an_error_keeps_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    replace_file(path, b"old")
    with pytest.raises(OSError, match="full"):
        fail_half_way(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def fail_for_want_of_room(path: Path) -> None:
    with replacing(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        fail_for_want_of_room(tmp_path / "report.md")
    assert caught.value.filename == str(tmp_path / "report.md")
