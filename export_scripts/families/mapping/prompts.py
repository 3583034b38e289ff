"""Prompt-learning archives (p-tuning, prompt tuning) for any family with prompt tables.

Archives: NeMo, MegatronGPTPromptLearningModel / MegatronT5PromptLearningModel. model_config.yaml
lists task_templates; the weights hold a table for each task.
"""

import re
from collections.abc import Mapping, Sequence

from export_scripts.checkpoints.base import (
    CheckpointReader,
    Tensors,
)
from export_scripts.families.layout.config import PromptTask
from export_scripts.families.mapping.source_mapping import Facts
from foundations.errors import CheckpointMismatchError, refuse
from foundations.files.json_content import Fields

# FasterTransformer's prompt_learning_type for tables that a task name selects.
P_PROMPT_TUNING = 3

_TABLE = re.compile(r"(?:^|\.)prompt_table\.(?P<task>[^.]+)\.prompt_embeddings\.weight$")
_TASK_NAME = re.compile(r"[\w][\w\- ]*")

# megatron_t5_adapter_model.py; newer versions write layers.<i>.<part>:<adapter>.
_PLACE = re.compile(
    r"^.*\.(?P<side>encoder|decoder)\.model\.layers\.(?P<layer>\d+)"
    r"(?:\.(?:self_attention|mlp|(?P<cross>inter_attention)))?:(?P<inter>inter_)?"
)


def _earlier(match: re.Match[str]) -> str:
    inter = "inter_" if match["cross"] or match["inter"] else ""
    side, layer = match["side"], match["layer"]
    return f"enc_dec_model.enc_dec_model.{side}.model.layers.{layer}:{inter}"


def added_tensors(
    prompts: Sequence[CheckpointReader],
    ia3: Sequence[CheckpointReader],
    adapters: Sequence[CheckpointReader],
) -> Tensors:
    """Return the tensors of added archives, by the names that source mappings use.

    A prompt table is "prompt:<task>", any other tensor of its archive "prompt.<number>:<key>".
    "ia3.<number>:<key>" and "adapter.<number>:<key>" have the key of earlier versions of NeMo,
    which names the layer of an adapter but not the part of the layer.

    Raises:
        CheckpointMismatchError: Two archives hold the same task, or a task cannot be a file name.
    """
    tensors = {}
    for number, archive in enumerate(prompts):
        for key in archive.tensors:
            match = _TABLE.search(key)
            name = f"prompt:{match['task']}" if match else f"prompt.{number}:{key}"
            if match and not _TASK_NAME.fullmatch(match["task"]):
                raise CheckpointMismatchError(
                    f"{archive.path}: task {match['task']!r} cannot be part of a file name"
                )
            if name in tensors:
                raise CheckpointMismatchError(
                    f"{archive.path}: task {match['task'] if match else key} was already added "
                    "by another prompt archive"
                )
            tensors[name] = archive.tensors[key]
    return tensors | {
        f"{kind}.{number}:{_PLACE.sub(_earlier, key)}": pieces
        for kind, archives in (("ia3", ia3), ("adapter", adapters))
        for number, archive in enumerate(archives)
        for key, pieces in archive.tensors.items()
    }


def prompt_fields(facts: Facts, *, start_id: int) -> Fields:
    """Return the config fields of the added prompt tables; `start_id` is the first virtual token.

    Raises:
        CheckpointMismatchError: An archive's templates and tables disagree.
    """
    tasks = []
    problems = []
    for archive in facts.prompts:
        templates = archive.config.get("task_templates")
        if not isinstance(templates, list) or not all(isinstance(t, Mapping) for t in templates):
            problems.append(f"{archive.path} lists no task_templates; is it a prompt archive?")
            continue
        for template in templates:
            name = str(template.get("taskname"))
            if not facts.has(f"prompt:{name}"):
                problems.append(f"{archive.path} has no table of task {name!r}")
                continue
            rows = facts.rows(f"prompt:{name}")
            stated = template.get("total_virtual_tokens", rows)
            if stated != rows:
                problems.append(
                    f"{archive.path}: task {name!r} states {stated} virtual tokens, its table "
                    f"has {rows} rows"
                )
            tasks.append(PromptTask(task_name=name, prompt_length=rows))
    refuse(problems)
    return {
        "tasks": tuple(tasks),
        "prompt_learning_start_id": start_id,
        "prompt_learning_type": P_PROMPT_TUNING,
    }
