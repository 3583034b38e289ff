"""Command: python -m export_scripts.list_families --help; numpy is not imported."""

import argparse
import json
import re
import sys
from collections.abc import Sequence

from export_scripts.families.table import SOURCE_MAPPINGS
from export_scripts.triton.repository import ENGINES
from foundations.commands import command_parser, run_command, say
from foundations.files.json_content import Fields, Table
from foundations.tables import markdown_table, text_table


def support_table() -> list[Fields]:
    """Return a row for each source: its family, add-ons, whether it is written, ranks, engines."""
    rows = []
    for mapping in SOURCE_MAPPINGS:
        family = mapping.family
        engines = [name for name in ENGINES if name != "fastertransformer" or family.ft_backend]
        rows.append(
            {
                "source": mapping.title,
                "format": mapping.format,
                "family": family.name,
                "model_type": family.model_type,
                "adds": [kind.replace("_", " ") for kind in mapping.accepts],
                "leaves": "yes" if mapping.written is not None else "",
                "divisible": list(family.divisible) if family.has_shards else [],
                "engines": engines if family.has_shards else ["vllm"],
            }
        )
    return rows


def leaving_table() -> list[Fields]:
    """Return a row for each family: formats that it is read from, models that it is written as."""
    rows = []
    for family in dict.fromkeys(mapping.family for mapping in SOURCE_MAPPINGS):
        mappings = [mapping for mapping in SOURCE_MAPPINGS if mapping.family is family]
        rows.append(
            {
                "family": family.name,
                "formats": [
                    *dict.fromkeys(mapping.format for mapping in mappings),
                    *(["shards"] if family.has_shards else []),
                ],
                "targets": [
                    re.split(r" \(|, or ", mapping.title.removeprefix("Hugging Face "))[0]
                    for mapping in mappings
                    if mapping.written is not None and mapping.format == "huggingface"
                ],
                "megatron": [
                    name
                    for mapping in mappings
                    if mapping.written is not None and mapping.format == "megatron"
                    for name in ("GPTModel", "HybridModel")
                ],
            }
        )
    return rows


Columns = Sequence[tuple[str, str]]
_LEAVING: Columns = (
    ("family", "family"),
    ("from", "formats"),
    ("to Hugging Face", "targets"),
    ("to torch_dist", "megatron"),
)
_COLUMNS: Columns = (
    ("source", "source"),
    ("format", "format"),
    ("becomes", "family"),
    ("add-ons", "adds"),
    ("written too", "leaves"),
    ("TP divides", "divisible"),
    ("served by", "engines"),
)


def table_text(rows: Sequence[Table], markdown: bool, columns: Columns = _COLUMNS) -> str:
    """Return a table as aligned text or as Markdown."""
    head = [title for title, _ in columns]
    cells = [[_cell(row[key]) for _, key in columns] for row in rows]
    return markdown_table(head, cells) if markdown else text_table(head, cells, rule=False)


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
    parser.add_argument(
        "--leaving", action="store_true", help="list what each family is written as instead"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")

    def handler(options: argparse.Namespace) -> None:
        rows, columns = support_table(), _COLUMNS
        if options.leaving:
            rows, columns = leaving_table(), _LEAVING
        text = table_text(rows, options.markdown, columns)
        say(json.dumps(rows, indent=1) if options.json else text)

    return run_command(parser, handler, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
