"""Find a data set on disk or fetch it once, with a pinned checksum; draw its samples."""

from __future__ import annotations

import hashlib
import random
import shutil
import urllib.request
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_scripts.files.checksum import sha256_of
from export_scripts.files.replace import replacing
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.task import Dataset, Sample

_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class DataSource:
    """A file to download.

    Attributes:
        sha256: its checksum in hexadecimal.
        member: the file in it where it is a ZIP.
        file_name: under which it is kept, unless under that of `url`.
    """

    url: str
    sha256: str
    member: str = ""
    file_name: str = ""


def data_file(
    task: str, given: str | None, source: DataSource | None, data_dir: Path, *, recipe: str = ""
) -> Path:
    """Return the data of a task: the file that was given, or `source`, kept in `data_dir`.

    Raises:
        ValueError: there is neither, which `recipe` helps, or `ensure_dataset` fails.
    """
    if given is not None:
        return Path(given)
    if source is None:
        raise ValueError(recipe)
    path = ensure_dataset(
        data_dir / (source.file_name or source.url.rstrip("/").rpartition("/")[2]),
        url=source.url,
        sha256=source.sha256,
        key=f"evaluate.{task}.data_path",
    )
    return _unpacked(path, source.member) if source.member else path


def ensure_dataset(path: Path, *, url: str, sha256: str, key: str) -> Path:
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
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as file:
            found = _download(url, file.write)
            if found != sha256:
                raise ValueError(
                    f"{url} gave a file with SHA-256 {found}, expected {sha256}; nothing was "
                    f"kept. Place the right file at {path}, or set {key}."
                )
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ValueError(
            f"cannot download {url} ({reason}); on a machine without network place the file "
            f"(SHA-256 {sha256}) at {path}, or set {key} to where it is."
        ) from error
    return path


def _unpacked(archive: Path, member: str) -> Path:
    """Return a file of a ZIP, unpacked next to it under `<archive>_<file>`."""
    path = archive.with_name(f"{archive.stem}_{Path(member).name}")
    with zipfile.ZipFile(archive) as files, files.open(member) as source, replacing(path) as file:
        shutil.copyfileobj(source, file)
    return path


def _download(url: str, write: Callable[[bytes], Any]) -> str:
    """Stream `url` into `write` and return the SHA-256 of what came."""
    digest = hashlib.sha256()
    received = 0
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        expected = response.headers.get("Content-Length")
        while chunk := response.read(_CHUNK_BYTES):
            digest.update(chunk)
            received += len(chunk)
            write(chunk)
    if expected is not None and received != int(expected):
        raise OSError(f"connection ended after {received} of {expected} bytes")
    return digest.hexdigest()


def drawn(
    samples: Sequence[Sample], options: EvaluationOptions, *, name: str, path: str, sha256: str
) -> tuple[Dataset, Sequence[Sample]]:
    """Return the samples to ask and what they are drawn from: `options.limit` of all, in order.

    `name`, `path` and `sha256` are those of the data set.
    """
    total, limit, seed = len(samples), options.limit, options.seed
    if limit is None or limit >= total:
        return Dataset(name, path, sha256, total, total), samples
    chosen = sorted(random.Random(seed).sample(range(total), limit))
    return Dataset(name, path, sha256, total, limit, limit, seed), [samples[i] for i in chosen]


def drawn_from_file(
    samples: Sequence[Sample], options: EvaluationOptions, path: Path
) -> tuple[Dataset, Sequence[Sample]]:
    """Return what `drawn` does of the samples that a file holds."""
    return drawn(samples, options, name=path.name, path=str(path), sha256=sha256_of(path))


def missing_files(task: str, files: Mapping[str, str | None]) -> list[str]:
    """Return a problem for each named file that does not exist."""
    return [
        f"evaluate.{task}.{key}={path} is not a file; give an existing file, or null."
        for key, path in files.items()
        if path is not None and not Path(path).is_file()
    ]
