"""Command: python -m export_scripts.validate --help."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from export_scripts.conversion.convert import folder_problems
from export_scripts.ft.layout import manifest_path
from foundations.commands import command_parser, run_command, say


def _described(folder: Path) -> str:
    files = [file for pattern in ("*.bin", "*.safetensors") for file in folder.glob(pattern)]
    return f"{len(files)} weight files, {sum(file.stat().st_size for file in files):,} bytes"


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    parser = command_parser(
        "validate",
        """
        Compare a converted folder with its config.ini or config.json and its manifest: the set of
        files or tensors, their sizes, and (unless --quick) every checksum.
        """,
        "exit status: 0 when they agree, 1 with every difference listed.",
    )
    parser.add_argument(
        "folder", type=Path, help="a folder such as out/1/2-gpu or out/1/huggingface"
    )
    parser.add_argument("--quick", action="store_true", help="do not compute checksums")

    def handler(options: argparse.Namespace) -> int:
        if problems := folder_problems(options.folder, checksums=not options.quick):
            say(f"{options.folder} is not sound:")
            for problem in problems:
                say(f"  {problem}")
            return 1
        manifest = manifest_path(options.folder).exists()
        how = "sizes" if options.quick or not manifest else "sizes and checksums"
        say(
            f"{options.folder} is sound: {_described(options.folder)}; {how} agree"
            + ("" if manifest else " (the folder has no manifest)")
        )
        return 0

    return run_command(parser, handler, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
