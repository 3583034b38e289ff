"""Pages of the site that are not in docs/: pages of the root, and references built from code."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "index.md": "README.md",
    **{name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "SUPPORT.md")},
}
COMMANDS = (
    "export_scripts.convert",
    "export_scripts.build_repository",
    "export_scripts.inspect",
    "export_scripts.validate",
    "export_scripts.list_families",
    "export_scripts.synthesize",
    "inference.server",
    "inference.client",
    "inference.certify",
    "inference.compare",
    "inference.pytriton.server",
)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    pages = {name: (ROOT / source).read_text("utf-8") for name, source in ROOT_PAGES.items()}
    pages |= {"keys.md": _keys(), "commands.md": _commands()}
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, *, files: Files, **_: Any) -> str:
    """Rewrite links between docs/ and the root to pages of the site."""

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, _, anchor = target.partition("#")
        path = path.removeprefix("../").removeprefix("docs/")
        path = "index.md" if path == "README.md" else path
        if files.get_file_from_path(path) is None:
            return text  # a source file, which the site does not have
        return f"[{text}]({path}{'#' + anchor if anchor else ''})"

    return re.sub(r"\[([^\]]*)\]\(((?!http|#)[^)\s]+)\)", link, markdown)


def _keys() -> str:
    """Return the reference of the configuration, with a table for each section."""
    sys.path.insert(0, str(ROOT))
    from foundations.values import MISSING, shown
    from launcher_scripts.configuration.schema import KEYS

    lines = [
        "# Configuration",
        "",
        "Files of `conf/` may give other defaults; `--cfg job` shows them.",
    ]
    section = None
    for key in KEYS.values():
        group, _, leaf = key.name.rpartition(".")
        if group != section:
            section = group
            lines += [
                "",
                f"## {group or 'The root'}",
                "",
                "| key | default | meaning |",
                "|---|---|---|",
            ]
        meaning = key.text
        if key.choices:
            meaning += f" ({', '.join(map(shown, key.choices))})"
        if key.ge is not None:
            meaning += f" ({key.ge:g} to {key.le:g})"
        default = "required" if key.default == MISSING else f"`{shown(key.default)}`"
        lines.append(f"| `{leaf}` | {_cell(default)} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    for sign, written in (("|", "\\|"), ("<", "&lt;"), ("*", "\\*")):
        text = text.replace(sign, written)
    return text


def _commands() -> str:
    """Return the `--help` output of each command."""
    lines = ["# Commands", ""]
    for name, command in {"main.py": ["main.py"], **{c: ["-m", c] for c in COMMANDS}}.items():
        words: list[Any] = [sys.executable, *command, "--help"]
        printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        lines += [f"## {name}", "", "```text", printed.stdout.rstrip(), "```", ""]
    return "\n".join(lines)
