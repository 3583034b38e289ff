"""Facts of the served folder of shards, or of the checkpoint that will be converted to it."""

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
    """Return the configuration of a served folder; None without config.ini."""
    if folder is None or not (folder / CONFIG_NAME).is_file():
        return None
    return read_config(folder)[1]


def served_architecture(options: EvaluationOptions) -> Architecture | None:
    """Return the architecture of config.ini, or else of the checkpoint; None without either."""
    try:
        config = read_served(options.weights_dir)
        if config is None and options.source_path is not None and options.source_path.exists():
            from export_scripts.conversion.plan import source_config

            config = source_config(options.source_path, options.given)
    except ValueError:  # the stage that has to read it reports the error
        return None
    return None if config is None else config.architecture()


def shape_problems(shapes: Sequence[RequestShape], options: EvaluationOptions) -> list[str]:
    """Return a problem for each shape that exceeds the served model's sequence length."""
    architecture = served_architecture(options)
    if architecture is None or options.server is not None:
        return []
    positions = getattr(architecture, "max_pos_seq_len", None)  # BERT takes hidden states
    limits = [positions, options.max_seq_len]
    longest = min((limit for limit in limits if limit is not None), default=None)
    if longest is None:
        return []
    or_raise = ", or raise export.triton_deployment.parameters.max_seq_len"
    return [
        f"evaluate.latency.shapes has {shape.input_len}+{shape.output_len}, and this model allows "
        f"{longest} tokens in a sequence; lower it{or_raise * (longest != positions)}."
        for shape in shapes
        if _tokens(shape, architecture) > longest
    ]


def _tokens(shape: RequestShape, architecture: Architecture) -> int:
    """Return the longest sequence in tokens; the last token of an answer is never an input."""
    if isinstance(architecture, DecoderArchitecture):
        return shape.input_len + shape.output_len - 1
    if isinstance(architecture, EncoderDecoderArchitecture) and architecture.decoder_num_layer:
        return max(shape.input_len, shape.output_len)
    return shape.input_len


def virtual_tokens(
    task: str, options: PromptOptions, folder: Path | None
) -> tuple[range, int | None]:
    """Return the ids of a task's virtual tokens, and the number of its table in config.ini.

    The table is the one of `options.task_id`, or of the task's name. Without a table the ids are
    empty and the number is None.

    Raises:
        ValueError: the folder has no table of that number.
    """
    config = read_served(folder) if options.from_model else None
    for number, table in enumerate(config.tasks if config else ()):
        has_name = options.task_id is None and table.task_name.lower() == task
        if has_name or options.task_id == number:
            first = (config.prompt_learning_start_id if config else None) or 0
            return range(first, first + table.prompt_length), number
    if options.task_id is not None:
        raise ValueError(
            f"evaluate.{task}.prompt.task_id={options.task_id}: {folder} has no such prompt table; "
            f"leave out task_id and evaluate.{task}.prompt.from_model=false."
        )
    return range(0), None
