"""Find a data set on disk or fetch it once, with a pinned checksum; read JSON Lines strictly."""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

_CHUNK_BYTES = 1 << 20
_Item = TypeVar("_Item")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def ensure_dataset(
    path: Path,
    *,
    url: str,
    sha256: str,
    key: str,
    timeout_s: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Return `path`, downloading it first when it is missing.

    The final name appears by one rename after the checksum was verified, so a broken transfer
    leaves nothing behind and two runs at once do no harm.

    `key` is the configuration key with which a user can name another file.

    Raises:
        ValueError: the file cannot be fetched or its checksum differs; the message names the
            file to place by hand.
    """
    if path.is_file():
        found = sha256_of(path)
        if found != sha256:
            raise ValueError(
                f"{path} has SHA-256 {found}, expected {sha256}; delete it to download it again "
                f"from {url}, or set {key} to use a data set of your own."
            )
        return path
    if progress is not None:
        progress(f"downloading {url} to {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            found = _download(url, file.write, timeout_s=timeout_s)
        if found != sha256:
            raise ValueError(
                f"{url} gave a file with SHA-256 {found}, expected {sha256}; nothing was kept. "
                f"Place the right file at {path}, or set {key}."
            )
        Path(partial).replace(path)
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise ValueError(
            f"cannot download {url} ({reason}); on a machine without network place the file "
            f"(SHA-256 {sha256}) at {path}, or set {key} to where it is."
        ) from error
    finally:
        Path(partial).unlink(missing_ok=True)
    return path


def _download(url: str, write: Callable[[bytes], Any], *, timeout_s: float) -> str:
    """Stream `url` into `write` and return the SHA-256 of what came."""
    digest = hashlib.sha256()
    received = 0
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        expected = response.headers.get("Content-Length")
        while chunk := response.read(_CHUNK_BYTES):
            digest.update(chunk)
            received += len(chunk)
            write(chunk)
    if expected is not None and received != int(expected):
        raise OSError(f"connection ended after {received} of {expected} bytes")
    return digest.hexdigest()


def read_texts(path: Path, *, field: str = "text") -> list[str]:
    """Return the field `text` of every line of a JSON Lines file.

    Raises:
        ValueError: lines that are not an object with that string field (all of them are named),
            or no line at all.
    """
    texts: list[str] = []
    problems: list[str] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                problems.append(f"line {number}: not JSON ({error.msg})")
                continue
            text = row.get(field) if isinstance(row, dict) else None
            if not isinstance(text, str) or not text.strip():
                problems.append(f"line {number}: no text in field {field!r}")
                continue
            texts.append(text)
    if problems:
        shown = "\n  ".join(problems[:10])
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ValueError(f"{path} is not a data set of this form:\n  {shown}{more}")
    if not texts:
        raise ValueError(f"{path} holds no samples; expected one JSON object a line.")
    return texts


def draw(items: Sequence[_Item], *, limit: int | None, seed: int) -> list[_Item]:
    """Return `limit` items chosen at random by `seed`, in their own order; all when null."""
    if limit is None or limit >= len(items):
        return list(items)
    chosen = sorted(random.Random(seed).sample(range(len(items)), limit))
    return [items[index] for index in chosen]
