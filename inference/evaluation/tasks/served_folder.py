"""The served folder of shards, or the checkpoint it will be made of, as an evaluation sees it."""

from collections.abc import Sequence
from pathlib import Path

from export_scripts.families.layout.architecture import (
    Architecture,
    DecoderArchitecture,
    EncoderDecoderArchitecture,
)
from export_scripts.families.layout.config import FTConfig
from export_scripts.ft.config_ini import CONFIG_NAME, read_config
from inference.evaluation.options import EvaluationOptions, PromptOptions, RequestShape


def read_served(folder: Path | None) -> FTConfig | None:
    """Return the configuration of a served folder; None where there is no config.ini."""
    if folder is None or not (folder / CONFIG_NAME).is_file():
        return None
    return read_config(folder)[1]


def served_architecture(options: EvaluationOptions) -> Architecture | None:
    """Return what is served, by config.ini or else by the checkpoint; None where neither says."""
    try:
        config = read_served(options.weights_dir)
        if config is None and options.source_path is not None and options.source_path.exists():
            from export_scripts.conversion.plan import source_config

            config = source_config(options.source_path, options.given)
    except ValueError:  # reported by the stage that has to read it
        return None
    return None if config is None else config.architecture()


def shape_problems(shapes: Sequence[RequestShape], options: EvaluationOptions) -> list[str]:
    """Return a problem for each shape that the served model has no room for."""
    architecture = served_architecture(options)
    if architecture is None or options.server is not None:
        return []
    positions = getattr(architecture, "max_pos_seq_len", None)  # BERT takes hidden states
    limits = [positions, options.max_seq_len]
    longest = min((each for each in limits if each is not None), default=None)
    if longest is None:
        return []
    or_raise = ", or raise export.triton_deployment.parameters.max_seq_len"
    return [
        f"evaluate.latency.shapes has {shape.input_len}+{shape.output_len}, and a sequence of this "
        f"model holds {longest} tokens; lower it{or_raise * (longest != positions)}."
        for shape in shapes
        if _tokens(shape, architecture) > longest
    ]


def _tokens(shape: RequestShape, architecture: Architecture) -> int:
    """Return the tokens of the longest sequence; the last of an answer is never fed back."""
    if isinstance(architecture, DecoderArchitecture):
        return shape.input_len + shape.output_len - 1
    if isinstance(architecture, EncoderDecoderArchitecture) and architecture.decoder_num_layer:
        return max(shape.input_len, shape.output_len)
    return shape.input_len


def virtual_tokens(
    task: str, given: PromptOptions, folder: Path | None
) -> tuple[range, int | None]:
    """Return the ids of a task's virtual tokens, and the number of its table in config.ini.

    It is the table that `given.task_id` names, or the one of the task's name; without one there
    are no such tokens.

    Raises:
        ValueError: The folder has no table of that number.
    """
    config = read_served(folder) if given.from_model else None
    for number, each in enumerate(config.tasks if config else ()):
        is_asked = given.task_id is None and each.task_name.lower() == task
        if is_asked or given.task_id == number:
            first = (config.prompt_learning_start_id if config else None) or 0
            return range(first, first + each.prompt_length), number
    if given.task_id is not None:
        raise ValueError(
            f"evaluate.{task}.prompt.task_id={given.task_id}: {folder} lists no such prompt table; "
            "leave it out, and evaluate.<task>.prompt.from_model=false, too."
        )
    return range(0), None
