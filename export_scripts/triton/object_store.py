"""Publication of a repository to S3 or a compatible store, from which Triton loads it.

Large files are sent in parts, each with a checksum. A file is not sent again if the stored object
has its size and SHA-256, so an interrupted copy resumes. A model's config.pbtxt is sent last: until
then, the server does not see the model. Credentials come from the client library's chain
(environment, profile, role) and are never read here.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from foundations.errors import first_names
from foundations.files.checksum import sha256_of
from foundations.suggest import matches_any

CONFIG_FILE = "config.pbtxt"
_DIGEST = "sha256"  # key of the objects' metadata
_WORKERS = 8
_PLACE = re.compile(r"s3://(?:(https?://[^/?#]+:\d{1,5})/)?([^/?#:]+)(/[^?#]*|)")


@dataclass(frozen=True)
class StoreLocation:
    """A location in a bucket; `endpoint_url` is None for S3 itself."""

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None

    @property
    def triton_url(self) -> str:
        """The location in the form of tritonserver's --model-repository."""
        path = "/".join(filter(None, [self.bucket, self.prefix]))
        return f"s3://{self.endpoint_url}/{path}" if self.endpoint_url else f"s3://{path}"

    def key(self, name: str) -> str:
        """Return the key of an object from its path below this location."""
        return "/".join(filter(None, [self.prefix, name]))


@dataclass(frozen=True)
class PublishSummary:
    """Summary of a copy."""

    files: int
    sent: int
    sent_bytes: int


def parse_location(url: str) -> StoreLocation:
    """Return the location in a URL of Triton's form.

    `s3://bucket/prefix` is in S3, `s3://http://host:port/bucket/prefix` in another store.

    Raises:
        ValueError: The URL is malformed, or may hold a secret.
    """
    if "@" in url:  # the message must not repeat it, as it may be a secret
        raise ValueError(
            "the address of an object store holds a user or a password; leave them out: "
            "credentials come from the environment, ~/.aws or the machine's role."
        )
    place = _PLACE.fullmatch(url)
    if place is None:
        raise ValueError(
            f"{url} is not of the form s3://bucket/prefix, or s3://http://host:port/bucket/prefix "
            "for a store other than S3 itself."
        )
    return StoreLocation(place[2], place[3].strip("/"), place[1])


def publish_repository(
    repository: Path,
    location: StoreLocation,
    *,
    overwrite: bool = False,
    without: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> PublishSummary:
    """Copy the models of a repository to an object store.

    Args:
        repository: Folder of models; hidden files are left out.
        location: The destination; its bucket must exist.
        overwrite: Replace objects that differ and delete those not in the repository.
        without: Patterns of file names to leave out.
        progress: Called with (bytes done, bytes in total).

    Raises:
        ValueError: The repository is empty, or the store holds other contents and `overwrite` is
            off.
        OSError: The store cannot be reached, or refuses a request.
    """
    files = _files(repository, without)
    if not any(map(_is_config, files)):
        raise ValueError(f"{repository} holds no model ({CONFIG_FILE}) to publish.")
    with _Store(location) as store:
        send, delete, conflicts = _changes(files, store)
        if conflicts and not overwrite:
            raise ValueError(
                f"{location.triton_url} holds other contents: {first_names(conflicts, 3)}; "
                "set overwrite=true to replace them, or choose another prefix."
            )
        total = sum(path.stat().st_size for path in send.values())
        done, lock = 0, threading.Lock()

        def count(sent_bytes: int) -> None:  # called from several threads
            nonlocal done
            with lock:
                done += sent_bytes
                if progress is not None:
                    progress(done, max(total, done))

        # Configurations are deleted first and sent last.
        for is_config in (True, False):
            store.each(store.delete, (n for n in delete if _is_config(n) is is_config))
        for is_config in (False, True):
            store.each(
                lambda name: store.send(name, send[name], count),
                (name for name in send if _is_config(name) is is_config),
            )
    return PublishSummary(len(files), len(send), done)


def _changes(files: dict[str, Path], store: _Store) -> tuple[dict[str, Path], list[str], list[str]]:
    """Return (files to send, objects to delete, objects that are replaced or deleted)."""
    stored = store.objects()
    send = {name: path for name, path in files.items() if not store.holds(name, path, stored)}
    stale = set(stored) - set(files)
    conflicts = sorted(stale | (set(send) & set(stored)))
    # A model must not be visible while its files change.
    models = {name.partition("/")[0] for name in conflicts}
    configs = {f"{model}/{CONFIG_FILE}" for model in models}
    send |= {name: files[name] for name in configs & set(files)}
    return send, [*sorted(configs & set(stored)), *sorted(stale - configs)], conflicts


def _is_config(name: str) -> bool:
    return name.endswith(f"/{CONFIG_FILE}")


def _files(repository: Path, without: Sequence[str]) -> dict[str, Path]:
    """Return the files to copy, by their paths in the repository."""
    found = {}
    for path in sorted(repository.rglob("*")):
        name = path.relative_to(repository)
        if matches_any(path.name, without):
            continue
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            found[name.as_posix()] = path
    return found


class _Store:
    """The objects at a location, by their paths below it; failures become OSError."""

    def __init__(self, location: StoreLocation) -> None:
        self._location = location

    def __enter__(self) -> _Store:
        try:
            import boto3
            from boto3.s3.transfer import TransferConfig
        except ModuleNotFoundError as error:
            raise OSError(
                "publishing to an object store needs boto3; install the extra 's3'."
            ) from error
        self._client = boto3.client("s3", endpoint_url=self._location.endpoint_url)
        self._transfer = TransferConfig(max_concurrency=_WORKERS)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from boto3.exceptions import S3UploadFailedError
        from botocore.exceptions import BotoCoreError, ClientError

        self._client.close()
        if isinstance(error, BotoCoreError | ClientError | S3UploadFailedError):
            raise OSError(f"{self._location.triton_url}: {error}") from error

    def _place(self, name: str) -> dict[str, str]:
        return {"Bucket": self._location.bucket, "Key": self._location.key(name)}

    def objects(self) -> dict[str, int]:
        """Return path -> size in bytes of the objects."""
        base = self._location.key("") + "/" if self._location.prefix else ""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._location.bucket, Prefix=base
        )
        entries = (entry for page in pages for entry in page.get("Contents", ()))
        return {entry["Key"].removeprefix(base): int(entry["Size"]) for entry in entries}

    def holds(self, name: str, path: Path, stored: dict[str, int]) -> bool:
        """Return whether the stored object has the content of a file."""
        if stored.get(name) != path.stat().st_size:
            return False
        head = self._client.head_object(**self._place(name))
        return bool(head["Metadata"].get(_DIGEST) == sha256_of(path))

    def each(self, work: Callable[[str], object], names: Iterable[str]) -> None:
        """Call a function with names, several at a time."""
        with ThreadPoolExecutor(_WORKERS) as pool:
            for _ in pool.map(work, names):
                pass

    def send(self, name: str, path: Path, progress: Callable[[int], None]) -> None:
        """Send a file with its SHA-256."""
        self._client.upload_file(
            str(path),
            **self._place(name),
            ExtraArgs={"Metadata": {_DIGEST: sha256_of(path)}, "ChecksumAlgorithm": "SHA256"},
            Callback=progress,
            Config=self._transfer,
        )

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._client.delete_object(**self._place(name))
