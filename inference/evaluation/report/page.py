"""The frame of a page and its recurring parts, as HTML text.

A page needs nothing else: its content security policy forbids every request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, header: str, sections: Sequence[str], *, footer: str, script: str = "") -> str:
    """Return a whole page around its parts, which are HTML except for the title."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{asset('report.css')}</style>\n</head>\n<body>\n"
        + header
        + "<main>\n"
        + "\n".join(section for section in sections if section)
        + f"\n</main>\n<footer>{footer}</footer>\n{script}</body>\n</html>\n"
    )


def asset(name: str) -> str:
    """Return the text of a style sheet or script of this package."""
    return (resources.files("inference.evaluation.report") / "assets" / name).read_text("utf-8")


def figure(title: str, chart: str) -> str:
    """Return a card with a heading around a chart or a table."""
    return f'<div class="card"><h3>{escape(title)}</h3>{chart}</div>'


def facts_table(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values, which are HTML."""
    body = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows)
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] | None = None
) -> str:
    """Return a table of HTML cells; all columns but the first hold numbers unless told."""
    right = range(1, len(head)) if numbers is None else numbers

    def cells(row: Sequence[str], tag: str) -> str:
        kinds = [' class="number"' if index in right else "" for index in range(len(row))]
        return "".join(
            f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, row, strict=True)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
