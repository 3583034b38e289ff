"""Helpers of the command-line programs: output, progress, and errors in plain words."""

import argparse
import io
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from foundations.files.disk import full_disk

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 10.0

# Returns the exit status; None is 0.
Handler = Callable[[argparse.Namespace], int | None]


def say(text: str = "") -> None:
    """Write a line of the command's output."""
    sys.stdout.write(text + "\n")


def complain(text: str) -> None:
    """Write a line of errors or warnings."""
    sys.stderr.write(text + "\n")


def accept_any_text() -> None:
    """Make standard output escape what the locale cannot encode, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def run_command(
    parser: argparse.ArgumentParser,
    handler: Handler,
    arguments: Sequence[str] | None,
    *,
    refused: int = 1,
) -> int:
    """Return the exit status: the handler's, `refused` after an error, 130 after Ctrl-C."""
    options = parser.parse_args(arguments)
    accept_any_text()
    try:
        return handler(options) or 0
    except (ValueError, OSError) as error:
        full = full_disk(error, Path.cwd()) if isinstance(error, OSError) else None
        for line in (full or str(error)).split("\n"):
            complain(f"error: {line}")
        return refused
    except KeyboardInterrupt:
        complain("interrupted; run the same command again to continue")
        return 130


def parse_pair(text: str, option: str) -> tuple[str, str]:
    """Return the key and the value of an option written as KEY=VALUE.

    Raises:
        ValueError: The text has another form.
    """
    key, separator, value = text.partition("=")
    if not (key and separator):
        raise ValueError(f"{option} {text} is not KEY=VALUE")
    return key.strip(), value.strip()


class ProgressLine:
    """A progress line, redrawn on a terminal and repeated every few seconds in a log."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown = 0.0
        self._first: int | None = None
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        """Show bytes done, rate and time left."""
        now = time.monotonic()
        if self._first is None:
            self._first = done
        pause = _REDRAW_SECONDS if self._terminal else _LINE_SECONDS
        if now - self._shown < pause and done < total:
            return
        if not self._terminal and now - self._started < _LINE_SECONDS:
            return
        self._shown = now
        rate = (done - self._first) / max(now - self._started, 1e-3)
        left = f"{(total - done) / rate:.0f} s left" if rate > 0 else ""
        text = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {rate / 1e6:,.0f} MB/s, {left}"
        sys.stderr.write(f"\r\x1b[K{text}" if self._terminal else text + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Clear the line."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")


def command_parser(
    name: str, text: str, epilog: str = "", *, package: str = "export_scripts"
) -> argparse.ArgumentParser:
    """Return a parser for `python -m <package>.<name>` whose help text is not wrapped."""
    return argparse.ArgumentParser(
        prog=f"python -m {package}.{name}",
        description=textwrap.dedent(text).strip(),
        epilog=textwrap.dedent(epilog).strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
