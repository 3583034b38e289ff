"""Command: python -m export_scripts.add_tuning --help."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.base import CheckpointReader
from export_scripts.checkpoints.nemo import open_nemo
from export_scripts.commands import command_parser, run_command, say
from export_scripts.conversion.tensor_plan import values_of
from export_scripts.errors import CheckpointMismatchError, refuse
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.decoder import PROMPT_TABLE
from export_scripts.families.layout.spec import ModelFamily
from export_scripts.families.mapping.prompts import added_tensors, prompt_fields, prompt_tensors
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.families.mapping.sources import join
from export_scripts.families.t5.tuning import ia3_reasons, ia3_sources
from export_scripts.ft.config_ini import CONFIG_NAME, read_config, write_config
from export_scripts.ft.layout import ft_directory, tensor_table
from export_scripts.ft.validation import validate_directory
from export_scripts.numeric.arrays import to_float32
from export_scripts.synthesize import whole_folder, write_values

# The config of a folder with something added, and the values of the added tensors, whole.
Addition = tuple[FTConfig, Mapping[str, Any]]


def add_tuning(
    ft_dir: Path, output_dir: Path, *, prompts: Sequence[Path] = (), ia3: Sequence[Path] = ()
) -> Path:
    """Write a folder with the weights of another one and what was tuned on top; return it.

    The other folder is left as it is; on the same file system its files are linked, not copied.

    Args:
        ft_dir: Folder of shards, whatever made it.
        output_dir: Folder under which <N>-gpu appears, complete.
        prompts: Prompt-learning archives of NeMo.
        ia3: IA3 archives of NeMo, one task each, for a T5.

    Raises:
        ValueError: The folder or an archive cannot be used, or the result exists.
    """
    if not prompts and not ia3:
        raise ValueError("nothing to add; give --prompt-checkpoint or --ia3-checkpoint")
    if problems := validate_directory(ft_dir, checksums=False):
        raise CheckpointMismatchError([f"{ft_dir} cannot be used:", *problems])
    family, config = read_config(ft_dir)
    added: dict[str, Any] = {}
    for archives, addition in ((prompts, _added_prompts), (ia3, _added_ia3)):
        if archives:
            opened = tuple(open_nemo(path) for path in archives)
            config, tensors = addition(family, config, opened)
            added |= tensors
    table = tensor_table(family, config)
    if wrong := [name for name in added if tuple(added[name].shape) != tuple(table[name].shape)]:
        raise ValueError(
            "\n".join(
                f"{name} is {list(added[name].shape)}; {ft_dir} needs {list(table[name].shape)}"
                for name in wrong
            )
        )
    tp_size = config.tensor_para_size
    final = ft_directory(output_dir, tp_size)
    with whole_folder(final) as staging:
        for file in ft_dir.iterdir():
            if file.name != CONFIG_NAME:
                _link(file, staging / file.name)
        for name, values in added.items():
            write_values(staging, table[name], values, config)
        write_config(staging, config)
    return final


def _added_prompts(
    _: ModelFamily, config: FTConfig, archives: tuple[CheckpointReader, ...]
) -> Addition:
    tables = prompt_tensors(archives)
    facts = Facts(
        reader=archives[0],
        tp_size=config.tensor_para_size,
        weight_data_type=config.weight_data_type,
        prompts=archives,
        extra=tables,
    )
    fields = prompt_fields(facts, start_id=int(config.vocab_size))  # type: ignore[attr-defined]
    added = {}
    for task in fields["tasks"]:
        (piece,) = tables[f"prompt:{task.task_name}"]
        added[PROMPT_TABLE.format(task=task.task_name)] = piece.load(facts.maps)
    return _with_tasks(config, fields), added


def _added_ia3(
    family: ModelFamily, config: FTConfig, archives: tuple[CheckpointReader, ...]
) -> Addition:
    """Return the scalers of the tasks. Raises ValueError where the folder has no place for them."""
    present = getattr(config, "ia3_num_tasks", None)
    if present is None:
        raise ValueError(
            f"a {family.name} folder has no place for IA3: FasterTransformer has it for T5 alone"
        )
    if present:
        raise ValueError(f"the folder has {present} IA3 tasks already; add all to one without")
    refuse(ia3_reasons(archives, in_place=False))
    facts = Facts(
        reader=archives[0],
        tp_size=config.tensor_para_size,
        weight_data_type=config.weight_data_type,
        ia3=archives,
        extra=added_tensors("ia3", archives),
    )
    made = dataclasses.replace(config, ia3_num_tasks=len(archives))  # type: ignore[call-arg]
    sources = ia3_sources(facts)
    added: dict[str, Any] = {}
    missing: list[str] = []
    for spec, index, tensor in family.expand(made):
        if spec.name not in sources:
            continue
        keys = [key.format(**index) for key, _ in sources[spec.name].reads]
        missing += [f"{key} is missing (needed for {tensor.name})" for key in keys
                    if not facts.has(key)]  # fmt: skip
        if not missing:
            parts = sources[spec.name].build(values_of(facts, index), made)
            added[tensor.name] = join([to_float32(each) for each in parts.tensors], parts.axis)
    refuse(missing)
    return made, added


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


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "add_tuning",
        """
        Add p-tuned prompt tables, or IA3 tasks of a T5, to a converted folder without the
        checkpoint it was made of: a new folder <output-dir>/<N>-gpu has its weights, as links where
        possible, and what was added.
        """,
        """
        example:
          python -m export_scripts.add_tuning --ft-dir out/1/2-gpu \\
              --prompt-checkpoint boolq.nemo --output-dir tuned/1

        exit status: 0 when the folder is complete, 1 after a reported error.
        """,
    )
    add = parser.add_argument
    add("--ft-dir", type=Path, required=True, metavar="DIR", help="the converted folder")
    add("--prompt-checkpoint", type=Path, action="append", default=[], metavar="PATH",
        help="prompt-learning archive of NeMo; repeat for more")  # fmt: skip
    add("--ia3-checkpoint", type=Path, action="append", default=[], metavar="PATH",
        help="IA3 archive of NeMo for a T5, one task each; repeat for more")  # fmt: skip
    add("--output-dir", type=Path, required=True, metavar="DIR",
        help="folder in which <N>-gpu is made")  # fmt: skip
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""

    def handler(options: argparse.Namespace) -> int:
        made = add_tuning(
            options.ft_dir,
            options.output_dir,
            prompts=options.prompt_checkpoint,
            ia3=options.ia3_checkpoint,
        )
        say(str(made))
        return 0

    return run_command(_parser(), handler, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
