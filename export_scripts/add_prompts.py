"""Command: python -m export_scripts.add_prompts --help."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from export_scripts.checkpoints.base import FileMaps, Piece
from export_scripts.checkpoints.nemo import open_nemo
from export_scripts.commands import command_parser, run_command, say
from export_scripts.errors import CheckpointMismatchError
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.mapping.prompts import PROMPT_TABLE, prompt_fields, prompt_tensors
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.ft.config_ini import CONFIG_NAME, read_config, write_config
from export_scripts.ft.layout import ft_directory, staging_directory, tensor_table
from export_scripts.ft.validation import validate_directory
from export_scripts.numeric.arrays import DTYPES, store


def add_prompts(ft_dir: Path, archives: Sequence[Path], output_dir: Path) -> Path:
    """Write a folder with the weights of another one and further prompt tables; return it.

    The other folder is left as it is; on the same file system its files are linked, not copied.

    Args:
        ft_dir: Folder of shards, whatever made it.
        archives: Prompt-learning archives of NeMo.
        output_dir: Folder under which <N>-gpu appears, complete.

    Raises:
        ValueError: The folder or an archive cannot be used, or the result exists.
    """
    if problems := validate_directory(ft_dir, checksums=False):
        raise CheckpointMismatchError([f"{ft_dir} cannot be used:", *problems])
    family, config = read_config(ft_dir)
    readers = tuple(open_nemo(path) for path in archives)
    tables = prompt_tensors(readers)
    facts = Facts(
        reader=readers[0],
        tp_size=config.tensor_para_size,
        weight_data_type=config.weight_data_type,
        prompts=readers,
        extra=tables,
    )
    made = _with_tasks(config, prompt_fields(facts, start_id=int(config.vocab_size)))  # type: ignore[attr-defined]
    added = {PROMPT_TABLE.format(task=each.task_name): each.task_name for each in made.tasks}
    wanted = {
        name: tensor
        for name, tensor in tensor_table(family, made).items()
        if name in added and not (ft_dir / tensor.file_name(0)).exists()
    }
    for name, tensor in wanted.items():
        shape = tuple(tables[f"prompt:{added[name]}"][0].shape)
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"the table of task {added[name]} is {list(shape)}; {ft_dir} needs "
                f"{list(tensor.shape)}"
            )
    tp_size = config.tensor_para_size
    final, staging = (f(output_dir, tp_size) for f in (ft_directory, staging_directory))
    if final.exists():
        raise ValueError(f"{final} exists; choose another --output-dir")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        for file in ft_dir.iterdir():
            if file.name != CONFIG_NAME:
                _link(file, staging / file.name)
        for name, tensor in wanted.items():
            values = np.empty(tensor.shape, DTYPES[tensor.dtype or config.weight_data_type])
            store(values, _loaded(tables, added[name]))
            values.tofile(staging / tensor.file_name(0))
        write_config(staging, made)
        staging.rename(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final


def _with_tasks(config: FTConfig, fields: Mapping[str, Any]) -> FTConfig:
    """Return a config with further tasks; virtual ids stay where they begin."""
    present = [task.task_name for task in config.tasks]
    again = [task.task_name for task in fields["tasks"] if task.task_name in present]
    if again or (config.tasks and config.prompt_learning_type != fields["prompt_learning_type"]):
        what = f"tables of {', '.join(again)}" if again else "prompts of another type"
        raise ValueError(f"the folder has {what} already")
    changes = dict(fields) | {"tasks": (*config.tasks, *fields["tasks"])}
    if config.tasks:
        changes["prompt_learning_start_id"] = config.prompt_learning_start_id
    return dataclasses.replace(config, **changes)


def _loaded(tables: Mapping[str, Sequence[Piece]], task: str) -> Any:
    (piece,) = tables[f"prompt:{task}"]
    return piece.load(FileMaps())


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "add_prompts",
        """
        Add p-tuned prompt tables to a converted folder without the checkpoint it was made of: a new
        folder <output-dir>/<N>-gpu has its weights, as links where possible, and the tables.
        """,
        """
        example:
          python -m export_scripts.add_prompts --ft-dir out/1/2-gpu \\
              --prompt-checkpoint boolq.nemo --output-dir tuned/1

        exit status: 0 when the folder is complete, 1 after a reported error.
        """,
    )
    add = parser.add_argument
    add("--ft-dir", type=Path, required=True, metavar="DIR", help="the converted folder")
    add("--prompt-checkpoint", type=Path, action="append", required=True, metavar="PATH",
        help="prompt-learning archive of NeMo; repeat for more")  # fmt: skip
    add("--output-dir", type=Path, required=True, metavar="DIR",
        help="folder in which <N>-gpu is made")  # fmt: skip
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""

    def handler(options: argparse.Namespace) -> int:
        say(str(add_prompts(options.ft_dir, options.prompt_checkpoint, options.output_dir)))
        return 0

    return run_command(_parser(), handler, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
