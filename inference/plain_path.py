"""Folder names that are safe for tritonserver's Python backend.

The backend starts its interpreter with an unquoted shell command and assumes ASCII names: with a
space in the repository's path, a model would load for ever.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from pathlib import Path


def is_plain(path: Path | str) -> bool:
    """Return whether a path is one word to a shell, of plain ASCII characters."""
    return shlex.quote(str(path)) == str(path)


def plain_temporary_folder() -> Path:
    """Return where temporary files go, if its name is safe, else /tmp."""
    folder = tempfile.gettempdir()
    return Path(folder if is_plain(folder) else "/tmp")


class PlainFolder:
    """A safe alias of a folder: a link in a temporary folder.

    A folder with a safe name keeps it, and so does an address outside this machine.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._home: Path | None = None

    @property
    def path(self) -> str:
        """The name to use; its first use makes the link."""
        if is_plain(self._folder) or not Path(self._folder).is_dir():
            return self._folder
        if self._home is None:
            self._home = Path(tempfile.mkdtemp(prefix="slipway-", dir=plain_temporary_folder()))
            (self._home / "repository").symlink_to(Path(self._folder).resolve())
        return str(self._home / "repository")

    def remove(self) -> None:
        """Remove the link, not the folder."""
        if self._home is not None:
            shutil.rmtree(self._home)
            self._home = None
