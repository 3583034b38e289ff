"""A report as a document of text, tables and charts, written as Markdown and as one HTML page.

The page holds the document as JSON, which its script draws; where scripts do not run it shows the
Markdown. Its content security policy forbids every request, and every style and script but its own,
which are named by their hashes: a script that reaches the page through data does not run.
"""

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from export_scripts.tables import markdown_table, text_table

GOOD, BAD, UNDECIDED, QUIET = "good", "bad", "open", "quiet"  # classes of report.css
_TEMPLATES = Path(__file__).parent / "templates"
_ENVIRONMENT = Environment(
    loader=FileSystemLoader(_TEMPLATES),
    autoescape=select_autoescape(["html", "xml"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
# Underscores inside a word do not mark up anything.
_MARKUP = re.compile(r"[\\`*\[\]<>&#]|(?<!\w)_|_(?!\w)")


@dataclass(frozen=True)
class Table:
    """A table of plain text.

    Attributes:
        numbers: columns that are aligned to the right.
        verdict: the column whose words are coloured.
        links: addresses, relative to the page, of cells by row and column ("0.1").
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: tuple[int, ...] = ()
    verdict: int | None = None
    links: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Return it as aligned columns for a terminal."""
        return text_table(self.head, self.rows, right=self.numbers, rule=False)

    def markdown(self) -> str:
        """Return it as a table of Markdown."""
        return markdown_table(self.head, [[_plain(cell) for cell in row] for row in self.rows])


@dataclass(frozen=True)
class Chart:
    """A chart as report.js draws it.

    Attributes:
        kind: a function of its `KINDS`.
        data: the part of the record that it draws.
    """

    kind: str
    data: Any


@dataclass(frozen=True)
class Section:
    """A part of a document; `code` is a command to be copied."""

    title: str
    text: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    code: str = ""


@dataclass(frozen=True)
class Document:
    """A whole report.

    Attributes:
        verdict, status: the outcome in a few words, and its colour.
        facts: names and values next to the title.
        samples: `metrics` by name and `rows`, a searchable table of the page alone.
        reload_s: seconds after which the page loads itself again.
    """

    title: str
    sections: Sequence[Section]
    verdict: str = ""
    status: str = QUIET
    facts: Sequence[tuple[str, str]] = ()
    samples: Mapping[str, Any] | None = None
    footer: str = ""
    reload_s: int | None = None

    def markdown(self) -> str:
        """Return all but the charts and the samples as Markdown."""
        headline = f"{self.title}: {self.verdict}" if self.verdict else self.title
        parts = [f"# {_plain(headline)}"]
        if self.facts:
            parts.append(Table(("", ""), self.facts).markdown())
        for section in self.sections:
            code = f"```\n{section.code}\n```" if section.code else ""
            body = [*map(_plain, section.text), code, *(t.markdown() for t in section.tables)]
            if any(body):
                parts += [f"## {_plain(section.title)}", *filter(None, body)]
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """Return the document as one HTML page that needs nothing else."""
        style, script = (Markup("\n" + _asset(name)) for name in ("report.css", "report.js"))
        policy = (
            f"default-src 'none'; style-src {_source_hash(style)}; "
            f"script-src {_source_hash(script)}; base-uri 'none'; form-action 'none'"
        )
        return render(
            "page.html",
            page=self,
            markdown=self.markdown(),
            data=_finite(asdict(self)),
            policy=Markup(policy),
            style=style,
            script=script,
        )


def render(template: str, **values: Any) -> str:
    """Return a template of HTML or XML with its values, which are escaped unless Markup."""
    return _ENVIRONMENT.get_template(template).render(**values)


def _finite(value: Any) -> Any:
    """Return JSON's values with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(text: str) -> str:
    """Return text as one line of Markdown that cannot hold markup or call a user."""
    escaped = _MARKUP.sub(lambda found: f"\\{found[0]}", text).replace("@", "&#64;")
    return " ".join(escaped.split())


def _asset(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _source_hash(text: str) -> str:
    """Return the policy's name of an inline text: its SHA-256 (CSP level 2, section 7.2.2)."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
