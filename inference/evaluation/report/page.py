"""A self-contained page and its recurring parts, as HTML text.

The content security policy forbids every request, and every style and script but the page's own:
those are named by their hashes, so a script that reaches the page through data does not run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

# Inside a script element these begin and end markup: `<!--` with `<script` swallows the rest of the
# page. U+2028 and U+2029, which end a line of JavaScript, are among what json.dumps escapes itself.
_ESCAPES = {ord(each): f"\\u{ord(each):04x}" for each in "<>&"}


def page(
    title: str,
    header: str,
    sections: Sequence[str],
    *,
    footer: str,
    data: Any = None,
    reload_s: int | None = None,
) -> str:
    """Return a whole page around its parts, which are HTML except for the title.

    `data`, if any, is embedded as JSON for the page's script. A page with `reload_s` loads itself
    again after so many seconds.
    """
    style = f"\n{_asset('report.css')}"
    script = "" if data is None else f"\n{_asset('report.js')}"
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        + (f'<meta http-equiv="refresh" content="{reload_s}">\n' if reload_s else "")
        + f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{header}"
        f"<main>\n{body}\n</main>\n<footer>{footer}</footer>\n"
        + (f"{_embedded(data)}<script>{script}</script>\n" if script else "")
        + "</body>\n</html>\n"
    )


def _policy(style: str, script: str) -> str:
    """Return the content security policy of a page with one style sheet and at most one script."""
    allowed = f"script-src {_source_hash(script)}; " if script else ""
    return (
        f"default-src 'none'; style-src {_source_hash(style)}; {allowed}"
        "base-uri 'none'; form-action 'none'"
    )


def _source_hash(text: str) -> str:
    """Return the policy's name of an inline text: its SHA-256 (CSP level 2, section 7.2.2)."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _embedded(data: Any) -> str:
    """Return data as a JSON element that holds no markup, whatever its texts are."""
    text = json.dumps(data).translate(_ESCAPES)
    return f'<script type="application/json" id="data">{text}</script>\n'


def _asset(name: str) -> str:
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
    """Return a table of HTML cells; columns of `numbers`, all but the first, are right-aligned."""
    right = range(1, len(head)) if numbers is None else numbers

    def cells(row: Sequence[str], tag: str) -> str:
        kinds = [' class="number"' if index in right else "" for index in range(len(row))]
        return "".join(
            f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, row, strict=True)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
