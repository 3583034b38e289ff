"""Command: python -m export_scripts.list_families --help."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from export_scripts.commands import command_parser, run_command, say
from export_scripts.inspection import support_table, table_text


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
