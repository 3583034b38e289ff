"""Output of the command: lines, a live progress line on a terminal, tables, lists of problems."""

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TextIO

from foundations.tables import text_table
from foundations.values import amount
from stages import record
from stages.progress import ProgressState

_BAR_WIDTH = 24
_FRAME_S = 0.1
# Without a terminal, a progress line is written when the phase changes, then at this interval.
_SPARSE_S = 15.0
# Terminal colours: green, yellow and red.
_COLOURS = {
    record.COMPLETED: "32",
    record.CANCELLED: "33",
    record.FAILED: "31",
    record.LOST: "31",
}


class Console:
    """Writer for one stream: a terminal gets a live progress line, other streams occasional lines.

    On a terminal, states are coloured unless NO_COLOR is set (no-color.org).
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        # A dumb terminal, such as an editor's, can neither erase a line nor show colour.
        self._live = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._coloured = self._live and not os.environ.get("NO_COLOR")
        self._shown_at = 0.0
        self._phase = ""
        self._state = ProgressState()
        self._is_line_open = False
        self._said: set[str] = set()

    def say(self, text: str = "") -> None:
        """Write a whole line."""
        self.write(f"{text}\n")

    def say_once(self, text: str) -> None:
        """Write a line unless it was written before: a loop may find the same reason again."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def write(self, text: str) -> None:
        """Write text as it is."""
        if self._is_line_open:
            self._stream.write("\r\x1b[K")
            self._is_line_open = False
        self._stream.write(text)
        self._stream.flush()

    def show(self, label: str, state: ProgressState, seconds: float) -> None:
        """Show the progress of a job."""
        now = time.monotonic()
        text = f"{label:<9}{seconds:4.0f} s  {progress_text(state)}"
        if self._live:
            if now - self._shown_at > _FRAME_S:
                self._shown_at = now
                self._stream.write("\r\x1b[K" + text[: self._columns()])
                self._stream.flush()
                self._is_line_open = True
            return
        phase = f"{label} {state.phase.partition(' ')[0]}"
        is_due = state != self._state and now - self._shown_at > _SPARSE_S
        if phase != self._phase or is_due:
            self._phase, self._state = phase, state
            self._shown_at = now
            self.say(f"  {text}")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        """Return rows as aligned columns under a header; states are coloured."""
        return text_table(header, rows, paint=self._painted)

    def refuse(self, problems: Sequence[str]) -> None:
        """Write every distinct problem; on a terminal, long lines are wrapped."""
        unique = list(dict.fromkeys(problem.removesuffix(".") for problem in problems))
        count = "one problem" if len(unique) == 1 else f"{len(unique)} problems"
        broken = textwrap.TextWrapper(
            self._columns(),
            initial_indent="  - ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        self.say(f"{count} found; nothing was started:")
        for each in unique:
            self.say("\n".join(broken.wrap(each)) if self._live else f"  - {each}")

    def _painted(self, cell: str) -> str:
        colour = _COLOURS.get(cell.strip()) if self._coloured else None
        return f"\x1b[{colour}m{cell}\x1b[0m" if colour else cell

    def _columns(self) -> int:
        """Return the number of characters that fit on one line of the terminal."""
        return shutil.get_terminal_size().columns - 1


def progress_text(state: ProgressState) -> str:
    """Return a progress bar with figures and phase; the phase alone while the total is unknown."""
    if state.total <= 0:
        return state.phase
    share = min(state.done / state.total, 1.0)
    filled = round(share * _BAR_WIDTH)
    bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
    if state.unit == "bytes":
        figures = f"{amount(state.done)}B of {amount(state.total)}B"
    else:
        figures = f"{state.done:g} of {state.total:g} {state.unit}"
    return f"[{bar}] {share:4.0%}  {figures}  {state.phase}"
