"""A folder under a name that tritonserver's Python backend can use.

The backend starts its interpreter with a shell command that quotes nothing, and the interpreter
takes names for ASCII: with a blank in the repository's path a model would load for ever.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from pathlib import Path


def is_plain(path: Path | str) -> bool:
    """Return whether a shell takes a path as one word, and no character of it is unusual."""
    return shlex.quote(str(path)) == str(path)


def native_path(text: str) -> Path:
    """Return a path as this process spells it: where it knows ASCII alone, with escapes."""
    return Path(os.fsdecode(text.encode()))


class PlainFolder:
    """Another name of a folder while it is needed: a link in a temporary folder.

    A folder whose own name is plain keeps it, as does what is no folder of this machine.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._home: Path | None = None

    @property
    def path(self) -> str:
        """The name to use; the link is made when it is first asked for."""
        if is_plain(self._folder) or not Path(self._folder).is_dir():
            return self._folder
        if self._home is None:
            self._home = Path(tempfile.mkdtemp(prefix="slipway-"))
            (self._home / "repository").symlink_to(Path(self._folder).resolve())
        return str(self._home / "repository")

    def remove(self) -> None:
        """Remove the link, not the folder."""
        if self._home is not None:
            shutil.rmtree(self._home)
            self._home = None
