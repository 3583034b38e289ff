"""The writer of a folder that appears complete or not at all; interrupted runs can be resumed.

Files are written to a hidden folder next to the final one, each under a temporary name until it is
complete. A journal lists the complete ones.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from export_scripts.ft.layout import manifest_path, staging_directory
from foundations.errors import CheckpointMismatchError
from foundations.files.checksum import checksum_of, crc32
from foundations.files.disk import (
    LARGE_BYTES,
    SequentialFile,
    sync_file_system,
    sync_folder,
)
from foundations.files.journal import Journal
from foundations.files.json_content import Fields, Table
from foundations.files.tree import files_below

Step = Callable[[], object]


class WorkPaths:
    """The paths of a folder and its manifest, and the hidden paths next to it while converting."""

    def __init__(self, final: Path) -> None:
        self.final = final
        self.manifest = manifest_path(final)
        self.new_manifest = self.manifest.with_name(f".{self.manifest.name}.writing")
        self.staging = staging_directory(final)
        hidden = final.with_name(f".{final.name}")
        self.journal = hidden.with_suffix(".journal")
        self.lock = hidden.with_suffix(".lock")
        self.replaced = hidden.with_suffix(".replaced")
        self.replaced_manifest = hidden.with_suffix(".replaced.json")
        self.scratch = hidden.with_suffix(".unpacked")


class WriteBehind:
    """A worker's write queue, whose steps run in order in a thread.

    A worker fills a buffer while the previous one is written. At most one step is pending when the
    worker fills the next buffer, so two alternating buffers are enough.
    """

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "write")
        self._last: concurrent.futures.Future[object] | None = None

    def wait(self) -> None:
        """Wait for all steps; raise the error of the last one."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def run(self, step: Step) -> None:
        """Wait for the previous step, raising its error, and start this one."""
        self.wait()
        self._last = self._thread.submit(step)

    def run_next(self, step: Step) -> None:
        """Queue a step without waiting; it is skipped if the previous one failed."""
        before = self._last

        def after() -> None:
            if before is not None:
                before.result()
            step()

        self._last = self._thread.submit(after)

    def close(self) -> None:
        """Wait for all steps, ignoring errors, and end the thread."""
        self._thread.shutdown(wait=True)


class FTWriter:
    """The files of a folder while they are written. Use it within a `folder_lock`.

    `identity` is a digest of everything that determines the contents; the journal of another
    identity is not resumed.
    """

    def __init__(self, paths: WorkPaths, identity: str) -> None:
        self.paths = paths
        self._journal = Journal(paths.journal, identity)
        self._boot = _boot_id()
        self._lock = threading.Lock()
        self._own = threading.local()
        self._queues: list[WriteBehind] = []
        self.records: dict[str, Fields] = {}

    def __enter__(self) -> FTWriter:
        """Resume an interrupted run of the same identity, or start over."""
        paths = self.paths
        if is_interrupted(paths, self._journal):
            self._resume()
        else:
            self.discard()
        paths.staging.mkdir(parents=True, exist_ok=True)
        for path in paths.staging.rglob("*"):  # does not enter linked folders
            is_complete = path.relative_to(paths.staging).as_posix() in self.records
            if path.is_symlink() or (path.is_file() and not is_complete):
                path.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for pending writes; complete files are kept for the next run."""
        for queue in self._queues:
            queue.close()

    def _resume(self) -> None:
        for line in self._journal.lines():
            # After a crash, a line may hold any bytes.
            with contextlib.suppress(ValueError, TypeError, KeyError):
                record = json.loads(line)
                path = self.paths.staging / record["file"]
                is_whole = path.is_file() and path.stat().st_size == record["size_bytes"]
                # After a reboot, the contents of a file in the journal may be lost.
                is_same_boot = record["boot"] == self._boot
                if is_whole and (is_same_boot or checksum_of(path) == record["crc32"]):
                    self.records[record["file"]] = record

    def write(
        self,
        name: str,
        size: int,
        chunks: Iterable[memoryview],
        *,
        facts: Table | None = None,
    ) -> None:
        """Write a file, which gets its name after it is complete. Thread-safe.

        Large files are written in the background; the last chunk may be pending when this returns
        (see `flush`). Small files overtake large ones.

        Args:
            name: File name, or path in the folder.
            size: Exact size in bytes.
            chunks: Contents in order. In a file of LARGE_BYTES or more, a chunk must stay unchanged
                until the next but one is requested.
            facts: Further entries of the record.

        Raises:
            OSError: A file cannot be written.
        """
        queue = self._queue() if size >= LARGE_BYTES else None
        run = queue.run if queue else lambda step: step()  # a thread does not pay off
        found = 0
        file = SequentialFile(self.paths.staging / name, size)
        try:
            for chunk in chunks:
                run(functools.partial(file.write, chunk))
                found = crc32(chunk, found)
            record = {
                "file": name, "size_bytes": size, "crc32": f"{found:08x}", "boot": self._boot,
                **(facts or {}),
            }  # fmt: skip
        except BaseException:
            with contextlib.suppress(OSError):  # the last step may have raised it already
                if queue:
                    queue.wait()
            file.close()
            raise

        def complete() -> None:
            file.finish()
            self._journal.add(record)
            self.records[name] = record

        if queue:
            queue.run_next(complete)
        else:
            complete()

    def _queue(self) -> WriteBehind:
        """Return the calling thread's queue."""
        queue = getattr(self._own, "queue", None)
        if queue is None:
            queue = self._own.queue = WriteBehind()
            with self._lock:
                self._queues.append(queue)
        return queue

    def flush(self) -> None:
        """Wait until every file is complete and has its name. No thread may be writing.

        Raises:
            OSError: A file cannot be written.
        """
        for queue in self._queues:
            queue.wait()

    def finish(self, manifest: Table) -> None:
        """Publish the folder: write its manifest, flush both to disk, and rename them.

        Raises:
            CheckpointMismatchError: The folder differs from the journal.
        """
        paths = self.paths
        staging = paths.staging
        found = {path.relative_to(staging).as_posix() for path in files_below(staging)}
        if found != set(self.records):
            odd = sorted(found ^ set(self.records))
            raise CheckpointMismatchError(f"{paths.staging} changed while converting: {odd}")
        text = json.dumps(manifest, indent=1) + "\n"
        paths.new_manifest.write_text(text, encoding="utf-8")
        sync_file_system(paths.staging)
        if paths.final.exists():
            if paths.manifest.exists():
                paths.manifest.rename(paths.replaced_manifest)
            paths.final.rename(paths.replaced)
        paths.new_manifest.rename(paths.manifest)
        paths.staging.rename(paths.final)
        sync_folder(paths.final.parent)
        self._journal.forget()
        _remove(paths.replaced)
        paths.replaced_manifest.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete everything written so far."""
        _remove(self.paths.staging)
        self._journal.forget()


def is_interrupted(paths: WorkPaths, journal: Journal) -> bool:
    """Return whether the interrupted run of a journal can be resumed.

    It cannot if a path is a symbolic link, whose target would be deleted or overwritten.
    """
    return journal.is_begun() and paths.staging.is_dir() and not paths.staging.is_symlink()


def recover(paths: WorkPaths) -> None:
    """Undo or complete a replacement that was interrupted. Requires the lock."""
    is_undone = paths.replaced.exists() and not paths.final.exists()
    if is_undone:
        paths.replaced.rename(paths.final)
    if paths.replaced_manifest.exists() and (is_undone or not paths.manifest.exists()):
        paths.replaced_manifest.rename(paths.manifest)
    _remove(paths.replaced)
    paths.replaced_manifest.unlink(missing_ok=True)
    if not paths.staging.is_dir():
        paths.journal.unlink(missing_ok=True)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
