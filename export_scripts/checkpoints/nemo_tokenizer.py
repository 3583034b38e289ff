"""Tokenizer files of NeMo 1.x: in its archive, next to its ranks, or at their source."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from export_scripts.checkpoints.base import TokenizerFile
from export_scripts.checkpoints.containers import Container
from export_scripts.checkpoints.pt_archive import Region
from export_scripts.errors import CheckpointMismatchError

# Relative tokenizer paths in a run's configuration start from where it was launched: look in the
# working directory, then from the checkpoint's folder upwards.
_ANCESTORS_SEARCHED = 4


def tokenizer_files(container: Container, config: Mapping[str, Any]) -> tuple[TokenizerFile, ...]:
    """Return the tokenizer files that a model's configuration names.

    Raises:
        CheckpointMismatchError: An archive lacks one of its files, or has several for one name.
    """
    settings = config.get("tokenizer")
    if not isinstance(settings, Mapping):
        return ()
    kinds = (
        ("model", "tokenizer", "*.model"),
        ("vocab_file", "vocab", "*vocab*"),
        ("merge_file", "merges", "*merge*.txt"),
    )
    found = []
    for key, stem, pattern in kinds:
        region = _tokenizer_region(container, settings.get(key), pattern)
        if region is not None:
            suffix = PurePosixPath(region.name or region.path.name).suffix
            is_outside = region not in container.members.values()
            found.append(
                TokenizerFile(
                    f"{stem}{suffix}", region.path, region.offset, region.size, is_outside
                )
            )
    return tuple(found)


def _tokenizer_region(container: Container, value: Any, pattern: str) -> Region | None:
    """Return a tokenizer file: in the root of the checkpoint, or at the configured path."""
    if not isinstance(value, str) or not value:
        return None
    inside = value.startswith(("nemo:", "/artifacts/"))
    wanted = f"*{PurePosixPath(value.removeprefix('nemo:')).name}" if inside else pattern
    root = [name for name in container.members if "/" not in name]
    hits = sorted(name for name in root if fnmatch.fnmatchcase(name, wanted))
    if len(hits) > 1:
        raise CheckpointMismatchError(
            f"{container.path} has several files for tokenizer {value!r}: {', '.join(hits)}"
        )
    if hits:
        return container.members[hits[0]]
    # A run started from an archive names files of the archive, which its own folder lacks.
    if inside and container.path.is_file():
        raise CheckpointMismatchError(f"{container.path} lacks its tokenizer file {value!r}")
    return _outside_file(container.path, Path(value))


def _outside_file(checkpoint: Path, value: Path) -> Region | None:
    bases = [Path(), checkpoint, *list(checkpoint.resolve().parents)[:_ANCESTORS_SEARCHED]]
    for base in bases:
        file = base / value
        if file.is_file():
            return Region(file, 0, file.stat().st_size)
    return None
