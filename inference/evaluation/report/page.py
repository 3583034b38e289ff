"""Templates of the report and of other pages, and what makes an HTML page self-contained.

The content security policy forbids every request, and every style and script but the page's own:
those are named by their hashes, so a script that reaches the page through data does not run.
"""

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from export_scripts.tables import markdown_table
from inference.evaluation.report import formatting

_TEMPLATES = Path(__file__).parent / "templates"
_ENVIRONMENT = Environment(
    loader=FileSystemLoader(_TEMPLATES),
    autoescape=select_autoescape(["html", "xml"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {
    name: function
    for name, function in vars(formatting).items()
    if name.endswith(("_text", "_title", "_hint"))
}
_ENVIRONMENT.globals |= {
    name: value
    for name, value in vars(formatting).items()
    if name.endswith(("_HEAD", "_rows", "_note", "_facts", "verdict"))
}


def render_text(template: str, **values: Any) -> str:
    """Return a template of Markdown or XML with its values."""
    return _ENVIRONMENT.get_template(template).render(markdown_table=markdown_table, **values)


def render_page(
    template: str, *, title: str, data: Any = None, reload_s: int | None = None, **values: Any
) -> str:
    """Return a whole page; values are escaped, unless they are Markup.

    `page.html` itself takes `charts` with their titles, `head` and `rows` of a table, and `footer`;
    if wanted, a `lead`, and the columns of `numbers`, which are all but the first unless given.

    `data`, if any, is embedded as JSON for the page's script. A page with `reload_s` loads itself
    again after so many seconds.
    """
    style = _asset("report.css")
    script = "" if data is None else _asset("report.js")
    policy = (
        f"default-src 'none'; style-src {_source_hash(style)}; "
        + (f"script-src {_source_hash(script)}; " if script else "")
        + "base-uri 'none'; form-action 'none'"
    )
    return _ENVIRONMENT.get_template(template).render(
        title=title,
        policy=Markup(policy),
        style=style,
        script=script,
        data=data,
        reload_s=reload_s,
        **{"lead": "", "numbers": None, **values},
    )


def draw(chart: str, *values: Any) -> Markup:
    """Return a chart by its macro in charts.html."""
    module: Any = _ENVIRONMENT.get_template("charts.html").module
    return Markup(getattr(module, chart)(*values))


def _asset(name: str) -> Markup:
    return Markup("\n" + (_TEMPLATES / name).read_text(encoding="utf-8"))


def _source_hash(text: str) -> str:
    """Return the policy's name of an inline text: its SHA-256 (CSP level 2, section 7.2.2)."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
