"""Command: python -m export_scripts.add_tuning --help."""

import argparse
import dataclasses
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from export_scripts.checkpoints.base import CheckpointReader
from export_scripts.checkpoints.nemo import open_nemo
from export_scripts.commands import command_parser, run_command, say
from export_scripts.conversion.request import ConversionRequest
from export_scripts.conversion.tensor_plan import plan_tensors
from export_scripts.errors import refuse
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.decoder import PROMPT_TABLE
from export_scripts.families.layout.spec import ModelFamily
from export_scripts.families.mapping.prompts import added_tensors, prompt_fields
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Copy, Sources, join
from export_scripts.families.t5.tuning import ia3_reasons, ia3_sources
from export_scripts.files.json_content import Fields, Table
from export_scripts.ft.config_ini import CONFIG_NAME, write_config
from export_scripts.ft.layout import ft_directory
from export_scripts.ft.validation import open_directory
from export_scripts.numeric.arrays import to_float32
from export_scripts.synthesize import whole_folder, write_values


def add_tuning(
    ft_dir: Path, output_dir: Path, *, prompts: Sequence[Path] = (), ia3: Sequence[Path] = ()
) -> Path:
    """Write <output_dir>/<N>-gpu, with a folder's weights and what NeMo tuned on top; return it.

    The other folder is left as it is; on the same file system its files are linked, not copied.
    IA3 archives are for a T5, one task each. The new folder appears complete.

    Raises:
        ValueError: The folder or an archive cannot be used, or the result exists.
    """
    if not prompts and not ia3:
        raise ValueError("nothing to add; give --prompt-checkpoint or --ia3-checkpoint")
    family, config, _ = open_directory(ft_dir)
    archives, scalers = (tuple(open_nemo(path) for path in paths) for paths in (prompts, ia3))
    facts = Facts(
        # Nothing is read of the model itself.
        reader=CheckpointReader("fastertransformer", ft_dir, {}, {}, ()),
        tp_size=config.tensor_para_size,
        weight_data_type=config.weight_data_type,
        prompts=archives,
        ia3=scalers,
        extra=added_tensors(archives, scalers, ()),
    )
    fields: Fields = {}
    sources: Sources = {}
    if archives:
        if all(spec.name != PROMPT_TABLE for spec in family.layout):
            raise ValueError(f"a {family.name} folder has no place for prompts; give a decoder's")
        start_id = int(config.vocab_size)  # type: ignore[attr-defined]
        fields |= prompt_fields(facts, start_id=start_id)
        sources[PROMPT_TABLE] = Copy("prompt:{task}")
    if scalers:
        fields |= _ia3_fields(family, config, scalers)
        sources |= ia3_sources(facts)
    layout = tuple(spec for spec in family.layout if spec.name in sources)
    added = dataclasses.replace(config, **fields)
    mapping = SourceMapping(
        name="tuning",
        title="folder with what was tuned on top",
        family=dataclasses.replace(family, layout=layout),
        format=facts.reader.format,
        matches=lambda _: True,
        config=lambda _: added,
        weights=lambda *_: sources,
        ignored=("*",),  # whatever else an archive holds
    )
    request = ConversionRequest(ft_dir, output_dir, facts.tp_size, facts.weight_data_type)
    plans, problems = plan_tensors(mapping, facts, added, request, tp_size=facts.tp_size)
    refuse(problems)
    whole = _with_tasks(config, fields) if archives else added
    final = ft_directory(output_dir, facts.tp_size)
    with whole_folder(final) as staging:
        for file in ft_dir.iterdir():
            if file.name != CONFIG_NAME:
                try:
                    os.link(file, staging / file.name)
                except OSError:  # another file system, or one without links
                    shutil.copy2(file, staging / file.name)
        for plan in plans:
            parts = plan.build(facts, added)
            values = join([to_float32(part) for part in parts.tensors], parts.axis)
            write_values(staging, plan.tensor, values, whole)
        write_config(staging, whole)
    return final


def _ia3_fields(
    family: ModelFamily, config: FTConfig, archives: Sequence[CheckpointReader]
) -> Fields:
    """Return the config fields of IA3 tasks. Raises ValueError if the folder cannot have them."""
    present = getattr(config, "ia3_num_tasks", None)
    if present is None:
        raise ValueError(
            f"a {family.name} folder has no place for IA3: FasterTransformer has it for T5 alone"
        )
    if present:
        raise ValueError(f"the folder has {present} IA3 tasks already; add all to one without")
    refuse(ia3_reasons(archives))
    return {"ia3_num_tasks": len(archives)}


def _with_tasks(config: FTConfig, fields: Table) -> FTConfig:
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
    several: Fields = {"type": Path, "action": "append", "default": [], "metavar": "PATH"}
    add("--prompt-checkpoint", dest="prompts", **several,
        help="prompt-learning archive of NeMo; repeat for more")  # fmt: skip
    add("--ia3-checkpoint", dest="ia3", **several,
        help="IA3 archive of NeMo for a T5, one task each; repeat for more")  # fmt: skip
    add("--output-dir", type=Path, required=True, metavar="DIR",
        help="folder in which <N>-gpu is made")  # fmt: skip
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    return run_command(_parser(), lambda options: say(str(add_tuning(**vars(options)))), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
