"""Command: python -m export_scripts.validate --help."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from export_scripts.commands import command_parser, run_command, say
from export_scripts.conversion.convert import folder_problems
from export_scripts.conversion.ft_source import is_ft_folder
from export_scripts.ft.config_ini import read_config
from export_scripts.ft.layout import expected_files, manifest_path


def _described(folder: Path) -> str:
    if not is_ft_folder(folder):
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
        return f"Hugging Face, {len(sizes)} weight files, {sum(sizes):,} bytes"
    family, config = read_config(folder)
    files = expected_files(family, config)
    return (
        f"{family.name}, {config.tensor_para_size} ranks, {config.weight_data_type}, "
        f"{len(files)} weight files, {sum(files.values()):,} bytes"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    parser = command_parser(
        "validate",
        """
        Compare a converted folder with its config.ini or config.json and its manifest: the exact
        set of files or tensors, each one's exact size, and (unless --quick) every checksum.
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
