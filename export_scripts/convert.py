"""Command: python -m export_scripts.convert --help."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from export_scripts.checkpoints.hub import cached_model
from export_scripts.commands import ProgressLine, command_parser, parse_pair, run_command, say
from export_scripts.conversion.convert import ConversionRequest, ConversionSummary, convert
from export_scripts.conversion.request import MAX_SHARD_BYTES, OUTPUT_FORMATS
from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES

_MOST_WORKERS = 8


def usual_workers() -> int:
    """Return the default number of workers: one per core this process may use, at most 8."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(cores, _MOST_WORKERS)


def convert_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `convert`."""
    parser = command_parser(
        "convert",
        """
        Convert a checkpoint into FasterTransformer shards in <output-dir>/<N>-gpu/.

        The format (NeMo, Megatron-LM, Hugging Face, ...) and the family are recognised. Any
        training parallelism becomes any inference parallelism that divides the model. What cannot
        be represented is refused, with every reason, before anything is written; an interrupted
        run continues when started again.
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
    add = parser.add_argument
    add("--checkpoint-path", type=Path, required=True, metavar="PATH",
        help="source: a .nemo archive, a folder, or the id of a model in the cache of the Hugging "
        "Face hub")  # fmt: skip
    add("--checkpoint-name", metavar="NAME",
        help="of several checkpoints in that folder, the one of this name or pattern "
        "(default: the last)")  # fmt: skip
    add("--output-dir", type=Path, required=True, metavar="DIR",
        help="folder in which <N>-gpu, or huggingface, is made")  # fmt: skip
    add("--tensor-model-parallel-size", type=int, default=1, metavar="N",
        help="tensor-parallel ranks of inference (default: 1)")  # fmt: skip
    add("--output-format", choices=OUTPUT_FORMATS, default=OUTPUT_FORMATS[0],
        help="shards for this engine and FasterTransformer's backend in <N>-gpu (default), or a "
        "folder huggingface for transformers, vLLM, SGLang and TensorRT-LLM")  # fmt: skip
    add("--max-shard-size", type=_bytes, default=MAX_SHARD_BYTES, metavar="SIZE",
        dest="max_shard_bytes",
        help="most bytes of a file of a Hugging Face folder, such as 2GB "
        "(default: 5GB)")  # fmt: skip
    add("--weight-data-type", required=True, choices=WEIGHT_DATA_TYPES, help="type on disk")
    workers = usual_workers()
    add("--processes", type=int, default=workers, metavar="N",
        help=f"workers (default: one a core, at most {_MOST_WORKERS}: {workers} here)")  # fmt: skip
    add("--pipeline-model-parallel-size", type=int, default=1, metavar="N",
        help="pipeline stages of inference, to check that they divide the layers")  # fmt: skip
    add("--model-type", metavar="KIND",
        help="refuse a checkpoint of another kind (gpt3, t5, mt5 or a family)")  # fmt: skip
    add("--prompt-checkpoint", type=Path, action="append", default=[], metavar="PATH",
        help="prompt-learning archive to add; repeat for more")  # fmt: skip
    add("--ia3-checkpoint", type=Path, action="append", default=[], metavar="PATH",
        help="IA3 archive to add, one task each; repeat for more")  # fmt: skip
    add("--ia3-in-place", action="store_true",
        help="multiply the IA3 scalers into the weights instead of storing them")  # fmt: skip
    add("--adapter-checkpoint", type=Path, action="append", default=[], metavar="PATH",
        help="linear adapter archive to add")  # fmt: skip
    add("--lora", type=Path, action="append", default=[], metavar="PATH",
        help="LoRA adapter (PEFT, NeMo, Megatron Bridge) to merge into the weights; repeat for "
        "more, merged in order")  # fmt: skip
    add("--activation-ranges", type=Path, metavar="FILE",
        help="activation ranges (.json or .pt): also write static int8 weights")  # fmt: skip
    add("--vocab-path", type=Path, metavar="FILE",
        help="vocabulary or sentencepiece model in place of the checkpoint's")  # fmt: skip
    add("--merges-path", type=Path, metavar="FILE", help="merges in place of the checkpoint's")
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="given",
        help="a config.ini value that the checkpoint lacks, such as head_num=16")  # fmt: skip
    add("--allow", action="append", default=[], metavar="PATTERN",
        help="accept unknown, damaged or non-finite tensors of these names")  # fmt: skip
    add("--overwrite", action="store_true", help="replace a folder that holds something else")
    return parser


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    size: int = int(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " ")
    return size


def request_of(options: argparse.Namespace) -> ConversionRequest:
    """Return the request in parsed arguments.

    Raises:
        ValueError: A --set is not KEY=VALUE.
    """
    return ConversionRequest(
        checkpoint_path=cached_model(options.checkpoint_path),
        checkpoint_name=options.checkpoint_name,
        output_dir=options.output_dir,
        tp_size=options.tensor_model_parallel_size,
        weight_data_type=options.weight_data_type,
        output_format=options.output_format,
        max_shard_bytes=options.max_shard_bytes,
        processes=options.processes,
        prompt_checkpoints=tuple(options.prompt_checkpoint),
        ia3_checkpoints=tuple(options.ia3_checkpoint),
        ia3_in_place=options.ia3_in_place,
        adapter_checkpoints=tuple(options.adapter_checkpoint),
        lora_checkpoints=tuple(options.lora),
        activation_ranges=options.activation_ranges,
        vocab_path=options.vocab_path,
        merges_path=options.merges_path,
        overwrite=options.overwrite,
        allow=tuple(options.allow),
        model_type=options.model_type,
        pp_size=options.pipeline_model_parallel_size,
        given=tuple(parse_pair(text, "--set") for text in options.given),
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""

    def handler(options: argparse.Namespace) -> int:
        line = ProgressLine()
        try:
            summary = convert(request_of(options), progress=line)
        finally:
            line.close()
        say(summary_text(summary))
        return 0

    return run_command(convert_parser(), handler, arguments)


def summary_text(summary: ConversionSummary) -> str:
    """Return a conversion's summary as text."""
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
