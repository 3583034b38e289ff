"""Output on a terminal, and without one."""

import io

import pytest

from foundations.tables import text_table
from launcher_scripts.console import Console, progress_text
from stages.progress import ProgressState

GREEN = "\x1b[32mcompleted\x1b[0m"
PROBLEMS = ["a.b=1: expected something else of at least so many words.", "a.b=1: no", "a.b=1: no"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _environment(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)


def table_on(stream: io.StringIO) -> str:
    return Console(stream).table(("stage", "state"), [("convert", "completed")])


def test_states_have_colours_on_a_terminal_alone():
    assert table_on(Terminal()).endswith(f"convert  {GREEN}")
    assert table_on(io.StringIO()).endswith("convert  completed")


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_left_out(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert "\x1b" not in table_on(Terminal())


def test_problems_are_reported_once_each_in_lines_of_the_terminal():
    stream = Terminal()
    Console(stream).refuse(PROBLEMS)
    assert stream.getvalue().splitlines() == [
        "2 problems found; nothing was started:",
        "  - a.b=1: expected something else of",
        "    at least so many words",
        "  - a.b=1: no",
    ]


def test_problems_in_a_file_are_a_line_each():
    stream = io.StringIO()
    Console(stream).refuse(PROBLEMS[:1])
    assert stream.getvalue() == (
        "one problem found; nothing was started:\n"
        "  - a.b=1: expected something else of at least so many words\n"
    )


def test_live_line_is_cut_to_the_terminal_and_erased_before_the_next():
    stream = Terminal()
    console = Console(stream)
    console.show("convert", ProgressState("converting " * 9), 1)
    console.say("done")
    live, last = stream.getvalue().removeprefix("\r\x1b[K").split("\r\x1b[K")
    assert live == "convert     1 s  converting converting "
    assert len(live) == 39
    assert last == "done\n"


def test_without_a_terminal_a_phase_is_reported_once():
    stream = io.StringIO()
    console = Console(stream)
    for seconds in (1, 2):
        console.show("convert", ProgressState("converting"), seconds)
    assert stream.getvalue() == "  convert     1 s  converting\n"


def test_table_aligns_its_columns():
    assert text_table(("a", "bb"), [("ccc", "d")]) == "a    bb\n---  --\nccc  d"


def test_progress_shows_a_bar_with_figures():
    text = progress_text(ProgressState("converting", 5e6, 1e7, "bytes"))
    assert text == "[############------------]  50%  5 MB of 10 MB  converting"


def test_progress_without_an_end_shows_the_phase():
    assert progress_text(ProgressState("loading")) == "loading"
