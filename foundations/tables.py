"""Tables as text: aligned columns for a terminal, Markdown, and rows of cells between tabs."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def text_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[int] = (),
    rule: bool = True,
    paint: Callable[[str], str] = str,
) -> str:
    """Return rows as aligned columns under a head and a rule; `right` lists right-aligned columns.

    `paint` decorates each padded cell without changing its width, such as by colours.
    """
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    texts = [
        "  ".join(
            paint(cell.rjust(width) if column in right else cell.ljust(width))
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    if rule:
        texts.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(texts)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows as a Markdown table; vertical bars in cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def read_cells(path: Path) -> list[list[str]]:
    """Return the cells of each row of a file whose columns are separated by tabs."""
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
