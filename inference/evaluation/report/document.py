"""Reports as Markdown, and as one HTML page whose script renders the Markdown and draws charts.

A page contains its Markdown, which remains readable without scripts, and the record as JSON. Its
content security policy forbids every request, and every style and script except its own, which it
names by hash: a script injected through data does not run.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pydantic_core import to_jsonable_python

from foundations.files.json_content import Table
from foundations.tables import text_table

GOOD, BAD, UNDECIDED, QUIET = "good", "bad", "open", "quiet"  # classes of report.css
_TEMPLATES = Path(__file__).parent / "templates"
# Underscores inside a word do not mark up anything.
_MARKUP = re.compile(r"[\\`*\[\]<>&#|~$]|(?<!\w)_|_(?!\w)")
_ESCAPED = re.compile(r"\\(.)|&#64;")
_CELL_END = re.compile(r"(?<!\\)\|")


def _plain(value: Any) -> Markup:
    """Return a value as one line of Markdown without markup and without mentions of users."""
    if isinstance(value, Markup):  # the output of a macro, whose values are escaped
        return value
    text = "" if value is None else str(value).encode(errors="replace").decode()
    escaped = _MARKUP.sub(lambda found: f"\\{found[0]}", text).replace("@", "&#64;")
    return Markup(" ".join(escaped.split()))


def code(text: str) -> Markup:
    """Return a command as a Markdown code block, with a fence longer than any in it."""
    fence = "`" * (1 + max(map(len, ["``", *re.findall("`+", text)])))
    return Markup(f"{fence}\n{' '.join(text.splitlines())}\n{fence}")


def value_text(value: float, unit: str) -> str:
    """Format a metric's value: a fraction as percent, others with four significant digits."""
    return f"{100 * value:.2f}%" if unit == "fraction" else number_text(value)


def number_text(value: float) -> str:
    """Format a number with four significant digits and thousands separators."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 1e9 or magnitude < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if magnitude >= 1000 else f"{value:.4g}"


def difference_text(value: float, unit: str) -> str:
    """Format a difference with its sign; for fractions in percentage points."""
    if value == 0:
        return "0"
    return f"{100 * value:+.2f} pt" if unit == "fraction" else f"{value:+.4g}"


def seconds_text(seconds: float) -> str:
    """Format a duration."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def milliseconds_text(value: float) -> str:
    """Format a latency."""
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def metric_title(name: str) -> str:
    """Return a metric's name as a heading: `lambada_last_word` becomes "Last word"."""
    words = name.split("_")[1:] or name.split("_")
    return " ".join(words).capitalize()


_FILTERS: Mapping[str, Callable[..., Any]] = {
    "code": code,
    "difference": difference_text,
    "metric_title": metric_title,
    "milliseconds": milliseconds_text,
    "number": number_text,
    "seconds": seconds_text,
    "value": value_text,
}


def _environment(**options: Any) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **options,
    )
    environment.filters.update(_FILTERS)
    return environment


_MARKUP_LANGUAGES = _environment()
_MARKDOWN = _environment(finalize=_plain)


def render(template: str, **values: Any) -> str:
    """Render an HTML or XML template; values are escaped unless they are Markup."""
    return _MARKUP_LANGUAGES.get_template(template).render(**values)


def markdown(template: str, **values: Any) -> str:
    """Render a Markdown template; each value becomes plain text on one line."""
    text = _MARKDOWN.get_template(f"{template}.md.jinja").render(**values)
    return re.sub("\n{3,}", "\n\n", text.strip()) + "\n"


@dataclass(frozen=True)
class Page:
    """A complete report.

    Attributes:
        text: its Markdown.
        data: the records that report.js draws, by their kind.
        verdict, status: the outcome in a few words, and its colour.
        reload_s: interval in seconds at which the page reloads itself; None: never.
    """

    title: str
    text: str
    data: Table
    verdict: str = ""
    status: str = QUIET
    footer: str = ""
    reload_s: int | None = None

    def html(self) -> str:
        """Return one self-contained HTML page."""
        style, script = (Markup("\n" + _asset(name)) for name in ("report.css", "report.js"))
        policy = (
            f"default-src 'none'; style-src {_source_hash(style)}; "
            f"script-src {_source_hash(script)}; base-uri 'none'; form-action 'none'"
        )
        return render(
            "page.html",
            page=self,
            data=to_jsonable_python(self.data, inf_nan_mode="null"),
            policy=Markup(policy),
            style=style,
            script=script,
        )


def part_text(name: str, *values: Any) -> str:
    """Render a macro of parts.md.jinja for a terminal."""
    return _unescaped(getattr(_MARKDOWN.get_template("parts.md.jinja").module, name)(*values))


def terminal_text(text: str) -> str:
    """Format Markdown for a terminal, with tables in aligned columns."""
    return "\n\n".join(map(_terminal_block, text.strip().split("\n\n")))


def _terminal_block(block: str) -> str:
    if not block.startswith("|"):
        return _unescaped(block.lstrip("# "))
    head, rule, *rows = (
        [_unescaped(cell.strip()) for cell in _CELL_END.split(line)[1:-1]]
        for line in block.splitlines()
    )
    right = [column for column, cell in enumerate(rule) if cell.endswith(":")]
    return text_table(head, rows, right=right, rule=False).strip("\n")


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: found[1] or "@", text)


def _asset(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _source_hash(text: str) -> str:
    """Return the CSP hash source of an inline text (CSP level 2, section 7.2.2)."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
