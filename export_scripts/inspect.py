"""Command: python -m export_scripts.inspect --help."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from export_scripts.commands import command_parser, run_command, say
from export_scripts.inspection import describe, description_text


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    parser = command_parser(
        "inspect",
        """
        Say what a checkpoint or a converted folder is: format, family, sizes, parallelism, types,
        tokenizer, and for a checkpoint whether it can be converted. Reads no tensor.
        """,
        "exit status: 0 when it is known what the path is, 1 otherwise.",
    )
    parser.add_argument("path", type=Path, help="a .nemo archive, a checkpoint or an FT folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")

    def handler(options: argparse.Namespace) -> int:
        facts = describe(options.path, tensors=options.tensors)
        say(json.dumps(facts, indent=1) if options.json else description_text(facts))
        return 0

    return run_command(parser, handler, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
