"""Command: python -m export_scripts.list_families --help; numpy is not imported."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from export_scripts.commands import command_parser, run_command, say
from export_scripts.families import SOURCE_MAPPINGS
from export_scripts.families.mapping.source_mapping import SourceMapping
from export_scripts.triton.model_folders import ENGINES


def support_table() -> list[dict[str, Any]]:
    """Return one row per source: its family, possible add-ons, and the engines that serve it."""
    return [_support_row(mapping) for mapping in SOURCE_MAPPINGS]


def _support_row(mapping: SourceMapping) -> dict[str, Any]:
    return {
        "source": mapping.title,
        "format": mapping.format,
        "family": mapping.family.name,
        "model_type": mapping.family.model_type,
        "adds": [kind.replace("_", " ") for kind in mapping.accepts],
        "engines": [
            name for name in ENGINES if name != "fastertransformer" or mapping.family.ft_backend
        ],
    }


_COLUMNS = (
    ("source", "source"),
    ("format", "format"),
    ("becomes", "family"),
    ("add-ons", "adds"),
    ("served by", "engines"),
)


def table_text(rows: Sequence[Mapping[str, Any]], markdown: bool) -> str:
    """Return the support table as aligned text or as Markdown."""
    table = [[title for title, _ in _COLUMNS]]
    table += [[_cell(row[key]) for _, key in _COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(_COLUMNS))]
    if markdown:
        rule = ["---"] * len(_COLUMNS)
        return "\n".join("| " + " | ".join(line) + " |" for line in [table[0], rule, *table[1:]])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def _cell(value: str | list[str]) -> str:
    return (", ".join(value) if isinstance(value, list) else value) or "-"


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    parser = command_parser(
        "list_families",
        """
        List every source that can be converted, the family it becomes, and which engines can
        serve the result.
        """,
    )
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--json", action="store_true", help="print JSON")

    def handler(options: argparse.Namespace) -> int:
        rows = support_table()
        say(json.dumps(rows, indent=1) if options.json else table_text(rows, options.markdown))
        return 0

    return run_command(parser, handler, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
