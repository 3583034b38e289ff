"""The commands of this package: arguments, progress and messages around its functions."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from export_scripts.convert import ConversionRequest, ConversionSummary, convert
from export_scripts.ft.dtypes import WEIGHT_DATA_TYPES

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 10.0
_MOST_WORKERS = 8

Handler = Callable[[argparse.Namespace], int]


def say(text: str = "") -> None:
    """Write a line of the command's output."""
    sys.stdout.write(text + "\n")


def complain(text: str) -> None:
    """Write a line of errors or warnings."""
    sys.stderr.write(text + "\n")


def run_command(parser: argparse.ArgumentParser, handler: Handler, arguments: Sequence[str]) -> int:
    """Return the exit status: 0, 1 after an error told in plain words, 130 after Ctrl-C."""
    options = parser.parse_args(arguments)
    try:
        return handler(options)
    except (ValueError, OSError) as error:
        for line in str(error).split("\n"):
            complain(f"error: {line}")
        return 1
    except KeyboardInterrupt:
        complain("interrupted; run the same command again to go on")
        return 130


class ProgressLine:
    """One line on a terminal, redrawn; a line now and then in a log."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown = 0.0
        self._first: int | None = None
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        """Show bytes done, rate and time left."""
        now = time.monotonic()
        if self._first is None:
            self._first = done
        pause = _REDRAW_SECONDS if self._terminal else _LINE_SECONDS
        if now - self._shown < pause and done < total:
            return
        if not self._terminal and now - self._started < _LINE_SECONDS:
            return
        self._shown = now
        rate = (done - self._first) / max(now - self._started, 1e-3)
        left = f"{(total - done) / rate:.0f} s left" if rate > 0 else ""
        text = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {rate / 1e6:,.0f} MB/s, {left}"
        sys.stderr.write(f"\r\x1b[K{text}" if self._terminal else text + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Clear the line."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")


def _parser(name: str, text: str, epilog: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m export_scripts.{name}",
        description=textwrap.dedent(text).strip(),
        epilog=textwrap.dedent(epilog).strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def usual_workers() -> int:
    """Return how many workers suit this process: one for each core it may use, up to 8."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(cores, _MOST_WORKERS)


def convert_parser() -> argparse.ArgumentParser:
    """Return the arguments of `convert`."""
    parser = _parser(
        "convert",
        """
        Convert a checkpoint into FasterTransformer shards: <output-dir>/<N>-gpu/ appears.

        The format (NeMo, Megatron-LM, Hugging Face, ...) and the family are recognised. Any
        training parallelism becomes any inference parallelism that divides the model. What cannot
        be represented is refused, with every reason, before anything is written; an interrupted
        run goes on when started again.
        """,
        """
        examples:
          python -m export_scripts.convert --checkpoint-path megatron_gpt.nemo \\
              --output-dir out/1 --tensor-model-parallel-size 2 --weight-data-type fp16
          python -m export_scripts.convert --checkpoint-path hf/gpt2 --output-dir out/1 \\
              --tensor-model-parallel-size 1 --weight-data-type fp32 --processes 4

        exit status: 0 when the folder is whole; 1 when it cannot be, with every reason told (and
        then there is none); 2 for wrong options; 130 after Ctrl-C (run it again to go on).
        """,
    )
    add = parser.add_argument
    add("--checkpoint-path", type=Path, required=True, metavar="PATH",
        help="source: a .nemo archive or a folder")  # fmt: skip
    add("--output-dir", type=Path, required=True, metavar="DIR",
        help="folder under which <N>-gpu is made")  # fmt: skip
    add("--tensor-model-parallel-size", type=int, required=True, metavar="N",
        help="tensor-parallel ranks of inference")  # fmt: skip
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
    add("--activation-ranges", type=Path, metavar="FILE",
        help="activation ranges (.json or .pt): also write static int8 weights")  # fmt: skip
    add("--vocab-path", type=Path, metavar="FILE",
        help="vocabulary or sentencepiece model in place of the checkpoint's")  # fmt: skip
    add("--merges-path", type=Path, metavar="FILE", help="merges in place of the checkpoint's")
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="given",
        help="a config.ini value the checkpoint does not tell, such as head_num=16")  # fmt: skip
    add("--allow", action="append", default=[], metavar="PATTERN",
        help="accept tensors of these names although unknown, damaged or not finite")  # fmt: skip
    add("--overwrite", action="store_true", help="replace a folder that holds something else")
    return parser


def request_of(options: argparse.Namespace) -> ConversionRequest:
    """Return the request that parsed arguments stand for.

    Raises:
        ValueError: A --set is not KEY=VALUE.
    """
    given = []
    for text in options.given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {text} is not KEY=VALUE")
        given.append((key.strip(), value.strip()))
    return ConversionRequest(
        checkpoint_path=options.checkpoint_path,
        output_dir=options.output_dir,
        tp_size=options.tensor_model_parallel_size,
        weight_data_type=options.weight_data_type,
        processes=options.processes,
        prompt_checkpoints=tuple(options.prompt_checkpoint),
        ia3_checkpoints=tuple(options.ia3_checkpoint),
        ia3_in_place=options.ia3_in_place,
        adapter_checkpoints=tuple(options.adapter_checkpoint),
        activation_ranges=options.activation_ranges,
        vocab_path=options.vocab_path,
        merges_path=options.merges_path,
        overwrite=options.overwrite,
        allow=tuple(options.allow),
        model_type=options.model_type,
        pp_size=options.pipeline_model_parallel_size,
        given=tuple(given),
    )


def convert_command(arguments: Sequence[str]) -> int:
    """Run `convert`; return the exit status."""

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
    """Return the summary of a conversion for people."""
    lines = [f"warning: {remark}" for remark in summary.remarks]
    if summary.already_done:
        lines.append(f"{summary.ft_dir} is already there: nothing left to do")
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


def validate_command(arguments: Sequence[str]) -> int:
    """Run `validate`; return the exit status."""
    from export_scripts.ft.config_ini import read_config
    from export_scripts.ft.layout import expected_files, manifest_path
    from export_scripts.validate import validate_directory

    parser = _parser(
        "validate",
        """
        Compare a converted folder with what its config.ini and its manifest say: the exact set of
        files, each one's exact size, and (unless --quick) every checksum.
        """,
        "exit status: 0 when sound, 1 with every difference listed.",
    )
    parser.add_argument("folder", type=Path, help="a folder such as out/1/2-gpu")
    parser.add_argument("--quick", action="store_true", help="do not compute checksums")

    def handler(options: argparse.Namespace) -> int:
        problems = validate_directory(options.folder, checksums=not options.quick)
        if problems:
            say(f"{options.folder} is not sound:")
            for problem in problems:
                say(f"  {problem}")
            return 1
        family, config = read_config(options.folder)
        files = expected_files(family, config, config.tensor_para_size)
        manifest = manifest_path(options.folder).exists()
        how = "sizes" if options.quick or not manifest else "sizes and checksums"
        say(
            f"{options.folder} is sound: {family.name}, {config.tensor_para_size} ranks, "
            f"{config.weight_data_type}, {len(files)} weight files, {sum(files.values()):,} bytes; "
            f"{how} agree" + ("" if manifest else " (no manifest lies beside it)")
        )
        return 0

    return run_command(parser, handler, arguments)


def inspect_command(arguments: Sequence[str]) -> int:
    """Run `inspect`; return the exit status."""
    from export_scripts.inspection import describe, description_text

    parser = _parser(
        "inspect",
        """
        Say what a checkpoint or a converted folder is: format, family, sizes, parallelism, types,
        tokenizer, and for a checkpoint whether it can be converted. Reads no tensor.
        """,
        "exit status: 0 when it is known what the path is, 1 otherwise.",
    )
    parser.add_argument("path", type=Path, help="a .nemo archive, a checkpoint or an FT folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")

    def handler(options: argparse.Namespace) -> int:
        facts = describe(options.path, tensors=options.tensors)
        say(json.dumps(facts, indent=1) if options.json else description_text(facts))
        return 0

    return run_command(parser, handler, arguments)


def list_families_command(arguments: Sequence[str]) -> int:
    """Run `list_families`; return the exit status."""
    from export_scripts.inspection import support_table, table_text

    parser = _parser(
        "list_families",
        """
        List every source that can be converted, the family it becomes, and which engines can
        serve the result.
        """,
    )
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--json", action="store_true", help="print JSON")

    def handler(options: argparse.Namespace) -> int:
        rows = support_table()
        say(json.dumps(rows, indent=1) if options.json else table_text(rows, options.markdown))
        return 0

    return run_command(parser, handler, arguments)
