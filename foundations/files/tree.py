"""The files of a folder tree, including those behind symbolic links."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def files_below(folder: Path, *, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield every file in a folder and its subfolders, following symbolic links.

    A link to a parent folder is not followed; folders without read permission are skipped.
    """
    above = (*above, folder.resolve())
    entries = []
    with suppress(PermissionError), os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        path = Path(entry.path)
        if entry.is_file():
            yield path
        elif entry.is_dir() and path.resolve() not in above:
            yield from files_below(path, above=above)
