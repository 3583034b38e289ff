"""Folder names that are safe for tritonserver's Python backend.

The backend starts its interpreter with an unquoted shell command and assumes ASCII names: with a
space in the repository's path, a model would load for ever.
"""

import contextlib
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path


def is_plain(path: Path | str) -> bool:
    """Return whether a path is one word to a shell, of plain ASCII characters."""
    return shlex.quote(str(path)) == str(path)


def plain_temporary_folder() -> Path:
    """Return where temporary files go, if its name is safe, else /tmp."""
    folder = tempfile.gettempdir()
    return Path(folder if is_plain(folder) else "/tmp")


@contextlib.contextmanager
def plain_folder(folder: str) -> Iterator[str]:
    """Yield a safe name of a folder: its own, or a link in a temporary folder.

    An address outside this machine stays as it is.
    """
    if is_plain(folder) or not Path(folder).is_dir():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="slipway-", dir=plain_temporary_folder()) as home:
        link = Path(home) / "repository"
        link.symlink_to(Path(folder).resolve())
        yield str(link)
