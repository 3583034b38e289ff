"""What the command shows: lines, one live line on a terminal, and the table at the end."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from stages.progress import ProgressState

_BAR_WIDTH = 24
_FRAME_S = 0.1
# Without a terminal a line appears when the phase changes, and then this often while it goes on.
_SPARSE_S = 15.0


class Console:
    """Writes to a stream; a terminal gets a line that moves, anything else a line now and then."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._shown_at = 0.0
        self._phase = ""
        self._state = ProgressState()
        self._is_line_open = False

    def say(self, text: str = "") -> None:
        """Write a whole line."""
        self.write(f"{text}\n")

    def write(self, text: str) -> None:
        """Write text as it is."""
        self._erase()
        self._stream.write(text)
        self._stream.flush()

    def show(self, label: str, state: ProgressState, seconds: float) -> None:
        """Show how far a job is."""
        now = time.monotonic()
        text = f"{label:<9}{seconds:4.0f} s  {progress_text(state)}"
        if self._live:
            if now - self._shown_at > _FRAME_S:
                self._shown_at = now
                width = shutil.get_terminal_size().columns - 1
                self._stream.write("\r\x1b[K" + text[:width])
                self._stream.flush()
                self._is_line_open = True
            return
        phase = f"{label} {state.phase.partition(' ')[0]}"
        is_due = state != self._state and now - self._shown_at > _SPARSE_S
        if phase != self._phase or is_due:
            self._phase, self._state = phase, state
            self._shown_at = now
            self.say(f"  {text}")

    def _erase(self) -> None:
        if self._is_line_open:
            self._stream.write("\r\x1b[K")
            self._is_line_open = False


def progress_text(state: ProgressState) -> str:
    """Return a bar with its figures, or the phase alone while the end is not known."""
    if state.total <= 0:
        return state.phase
    share = min(state.done / state.total, 1.0)
    filled = round(share * _BAR_WIDTH)
    bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
    if state.unit == "bytes":
        figures = f"{_size(state.done)} of {_size(state.total)}"
    else:
        figures = f"{state.done:g} of {state.total:g} {state.unit}"
    return f"[{bar}] {share:4.0%}  {figures}  {state.phase}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns under a header."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    texts = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([texts[0], "  ".join("-" * width for width in widths), *texts[1:]])


def _size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"
