"""A journal from which interrupted work resumes: a line of JSON for each result."""

import json
import os
import threading
from pathlib import Path
from typing import Any


class Journal:
    """Results as lines of JSON, after a first line that identifies the work. Thread-safe."""

    def __init__(self, path: Path, work: str) -> None:
        self.path, self._lock = path, threading.Lock()
        self._head = json.dumps(work)

    def lines(self) -> list[bytes]:
        """Return the results of an earlier run; the journal of other work is deleted.

        Text after the last line feed is an interrupted write. It is cut off: the next result would
        be appended to it.
        """
        if not self.is_begun():
            self.forget()
            return []
        _, *lines = self.path.read_bytes().split(b"\n")
        if torn := lines.pop():
            os.truncate(self.path, self.path.stat().st_size - len(torn))
        return lines

    def is_begun(self) -> bool:
        """Return whether an earlier run of the same work left a journal; links are not followed."""
        if self.path.is_symlink() or not self.path.is_file():
            return False
        with self.path.open("rb") as file:
            return file.readline() == f"{self._head}\n".encode()

    def add(self, result: Any) -> None:
        """Append a result."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            if not file.tell():
                file.write(f"{self._head}\n")
            file.write(json.dumps(result) + "\n")

    def forget(self) -> None:
        """Delete the journal."""
        with self._lock:
            self.path.unlink(missing_ok=True)
