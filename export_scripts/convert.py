"""Command: python -m export_scripts.convert --help."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from export_scripts.conversion.convert import ConversionRequest, ConversionSummary, convert
from export_scripts.conversion.hub import cached_model
from export_scripts.conversion.request import OPTION_NAMES, OUTPUT_FORMATS, ConversionOptions
from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES
from foundations.commands import ProgressLine, command_parser, parse_pair, run_command, say
from foundations.files.json_content import Fields
from foundations.values import keys_of

_MAX_WORKERS = 8


def default_workers() -> int:
    """Return the default number of workers: one per core that this process may use, at most 8."""
    return min(len(os.sched_getaffinity(0)), _MAX_WORKERS)


def convert_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `convert`."""
    parser = command_parser(
        "convert",
        """
        Convert a checkpoint to FasterTransformer shards in <output-dir>/<N>-gpu/.

        The format (NeMo, Megatron-LM, Hugging Face, ...) and the family are recognised. Any
        training parallelism becomes any inference parallelism that divides the model. What cannot
        be represented is refused, with every reason, before anything is written. An interrupted run
        resumes when it is started again.
        """,
        """
        examples:
          python -m export_scripts.convert --checkpoint-path megatron_gpt.nemo \\
              --output-dir out/1 --tensor-model-parallel-size 2 --weight-data-type fp16
          python -m export_scripts.convert --checkpoint-path hf/gpt2 --output-dir out/1 \\
              --tensor-model-parallel-size 1 --weight-data-type fp32 --processes 4

        exit status: 0 when the folder is complete; 1 when it cannot be made, with every reason
        listed and no folder left; 2 for wrong options; 130 after Ctrl-C (run it again to continue).
        """,
    )

    def add(field: str, text: str, **facts: Any) -> None:
        parser.add_argument(OPTION_NAMES[field], dest=field, help=text, **facts)

    count = {"type": int, "metavar": "N"}
    workers = default_workers()
    add("checkpoint_path", "source: a .nemo archive, a folder, or the id of a model in the cache "
        "of the Hugging Face hub", type=Path, required=True, metavar="PATH")  # fmt: skip
    add("checkpoint_name", "name or pattern of one of several checkpoints in that folder "
        "(default: the last)", metavar="NAME")  # fmt: skip
    add("output_dir", "folder in which <N>-gpu, huggingface, peft or torch_dist is created",
        type=Path, required=True, metavar="DIR")  # fmt: skip
    add("tp_size", "tensor-parallel ranks of inference (default: 1)", default=1, **count)
    add("output_format", "fastertransformer: shards in <N>-gpu for this engine and "
        "FasterTransformer's backend (default); huggingface: a folder for transformers, vLLM, "
        "SGLang and TensorRT-LLM; peft: the adapter of --lora without its model, for these; "
        "torch_dist: a checkpoint from which Megatron-LM continues training",
        choices=OUTPUT_FORMATS, default=OUTPUT_FORMATS[0])  # fmt: skip
    add("weight_data_type", "type on disk", required=True, choices=WEIGHT_DATA_TYPES)
    add("processes", f"workers (default: one per core, at most {_MAX_WORKERS}: {workers} here)",
        default=workers, **count)  # fmt: skip
    add("pp_size", "pipeline stages of inference, to check that they divide the layers",
        default=1, **count)  # fmt: skip
    add("model_type", "refuse a checkpoint of another kind (gpt3, t5, mt5 or a family)",
        metavar="KIND")  # fmt: skip
    add("given", "a config.ini value that the checkpoint lacks, such as head_num=16; repeat for "
        "more", metavar="KEY=VALUE", action="append", default=[])  # fmt: skip
    kinds: dict[Any, Fields] = {
        int: {"type": _bytes, "metavar": "SIZE"},  # every number among the options is a size
        bool: {"action": "store_true"},
        Path | None: {"type": Path, "metavar": "FILE"},
        str | None: {"metavar": "SIZE"},
        tuple[Path, ...]: {"type": Path, "metavar": "PATH", "action": "append"},
        tuple[str, ...]: {"metavar": "PATTERN", "action": "append"},
    }
    for key in keys_of(ConversionOptions):
        more = "; repeat for more" if key.is_list else ""
        facts = {"choices": key.choices} if key.choices else kinds[key.type]
        add(key.name, key.text + more, default=key.default, **facts)
    add("overwrite", "replace a folder that holds something else", action="store_true")
    return parser


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return int(found[1]) * int(1000 ** " KMGT".index(found[2].upper() or " "))


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""

    def handler(options: argparse.Namespace) -> None:
        values = vars(options) | {
            "checkpoint_path": cached_model(options.checkpoint_path),
            "given": [parse_pair(text, "--set") for text in options.given],
        }
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        line = ProgressLine()
        try:
            summary = convert(ConversionRequest(**values), progress=line)
        finally:
            line.close()
        say(summary_text(summary))

    return run_command(convert_parser(), handler, arguments)


def summary_text(summary: ConversionSummary) -> str:
    """Return the text that the command prints after a conversion."""
    lines = [f"warning: {remark}" for remark in summary.remarks]
    if summary.already_done:
        lines.append(f"{summary.ft_dir} is already complete; nothing to do")
    rate = summary.written_bytes / max(summary.seconds, 1e-6) / 1e6
    facts = (
        ("folder", str(summary.ft_dir)),
        ("family", summary.family),
        ("tensors", f"{summary.tensors:,} in {summary.files:,} files"),
        ("bytes", f"{summary.size_bytes:,} ({summary.written_bytes:,} written now)"),
        ("time", f"{summary.seconds:.2f} s" + (f", {rate:,.0f} MB/s" if rate else "")),
        ("peak memory", f"{summary.peak_memory_bytes / 1e6:,.0f} MB"),
    )
    return "\n".join([*lines, *(f"{name:12} {value}" for name, value in facts)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
