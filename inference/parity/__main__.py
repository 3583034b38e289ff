"""The command: python -m inference.parity."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from export_scripts.commands import accept_any_text, complain, parse_pair, say
from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES
from export_scripts.tables import text_table

if TYPE_CHECKING:
    from inference.parity.activations import ActivationDifference
    from inference.parity.comparison import ParityReport

_MOST_LISTED = 20
_WEIGHTS_ALONE = 3  # the exit status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inference.parity",
        description=textwrap.dedent(
            """
            Compare a checkpoint with the folder of shards made of it, without a server.

            Every file is compared with what the converter would write. A Hugging Face checkpoint
            is also computed by transformers, one in megatron-core layout by megatron-core, both in
            fp32, and the folder by the code that serves it, all its ranks in this process:
            embedding, attention, MLP and output of every layer, final norm and logits. The first
            layer and the first tensor that deviate are named.

            A Hugging Face folder that was made of the source is computed by transformers and
            compared likewise with the source's shards, which are made for it and removed.
            """
        ).strip(),
        epilog=textwrap.dedent(
            """
            exit status: 0 when nothing deviates, 1 when something does, 2 when the two cannot be
            compared, 3 when the weights are equal and no layer could be computed.
            """
        ).strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint-path", type=Path, required=True, metavar="SOURCE",
        help="the source: a .nemo archive or a folder")  # fmt: skip
    add("--ft-dir", type=Path, required=True, metavar="DIR",
        help="a folder such as out/1/2-gpu, or out/1/huggingface")  # fmt: skip
    add("--data-type", choices=WEIGHT_DATA_TYPES, default="fp32",
        help="what the folder's model is computed in (default fp32)")  # fmt: skip
    add("--tolerance", type=float, metavar="X",
        help="largest error, of the largest value of each part (default by type: fp32 1e-4, "
        "fp16 1e-2, bf16 8e-2)")  # fmt: skip
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt-ids", type=_ids, default=(), metavar="ID,ID,...",
        help="token ids to compute (default: 16 from all over the vocabulary)")  # fmt: skip
    prompt.add_argument("--text", help="text to compute, encoded by the folder's tokenizer")
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="given",
        help="a config.ini value the checkpoint does not state, as for the conversion")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write everything as JSON too")
    return parser


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write token ids with commas, such as 5,9,2"
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print the report and return the exit status."""
    options = _parser().parse_args(arguments)
    accept_any_text()
    from inference.parity.comparison import compare

    try:
        ids = options.prompt_ids
        if options.text:
            from inference.backend.tokenizer import load_tokenizer

            ids = tuple(load_tokenizer(options.ft_dir).encode(options.text))
        report = compare(
            options.checkpoint_path,
            options.ft_dir,
            data_type=options.data_type,
            tolerance=options.tolerance,
            prompt_ids=ids,
            given=[parse_pair(text, "--set") for text in options.given],
        )
        say(parity_text(report))
        if options.json is not None:
            options.json.write_text(report.to_json() + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        for line in str(error).split("\n"):
            complain(f"error: {line}")
        return 2
    if report.weights_alone:
        return _WEIGHTS_ALONE
    return 0 if report.equal else 1


def parity_text(report: ParityReport) -> str:
    """Return the whole report, the verdict last."""
    lines = [
        f"source   {report.checkpoint} ({report.source or report.weights.title})",
        f"folder   {report.ft_dir} ({report.folder})",
        *_weights(report),
    ]
    if report.activations:
        lines += ["", _table(report.activations)]
    if report.uncomputed:
        lines.append(f"layers   not compared: {report.uncomputed}")
    return "\n".join([*lines, "", *_verdict(report)])


def _weights(report: ParityReport) -> Iterator[str]:
    weights = report.weights
    counted = f"{weights.tensors} tensors in {weights.files} files"
    if weights.differences:
        differing = len(weights.differences)
        yield f"weights  {counted}; {differing} not as the converter would write them:"
    else:
        yield f"weights  {counted}, as the converter would write them"
    files = [
        f"{each.where}: {each.file}: {each.differing:,} of {each.values:,} values differ, by up to "
        f"{each.max_abs:.3g}"
        for each in weights.differences
    ]
    missing = [f"{name} is missing" for name in weights.missing]
    others = [f"{name} is not of this source; not compared" for name in weights.not_compared]
    settings = [f"config.ini: {setting}" for setting in weights.settings]
    for lines in (files, missing, [*weights.conflicts], others, settings):
        if len(lines) > _MOST_LISTED:
            lines[_MOST_LISTED:] = [f"... and {len(lines) - _MOST_LISTED} more like these"]
        yield from (f"         {line}" for line in lines)


def _table(rows: Sequence[ActivationDifference]) -> str:
    head = ("layer", "part", "max abs", "mean abs", "relative", "tolerance", "")
    cells = [
        (
            *(each.place.where, each.place.part),
            *(f"{value:.2e}" for value in (each.max_abs, each.mean_abs, each.relative)),
            *(f"{each.tolerance:.1e}", "deviates" * each.deviates),
        )
        for each in rows
    ]
    return text_table(head, cells, right=range(2, 6), rule=False)


def _verdict(report: ParityReport) -> Iterator[str]:
    place, file = report.first_place, report.first_file
    if report.equal:
        yield "equal within the tolerance"
        return
    if report.weights_alone:
        yield "every weight is the same; no layer was compared"
        return
    if place is not None:
        yield (
            f"first deviating layer:  {place.place}: relative error {place.relative:.2e} "
            f"exceeds {place.tolerance:.1e}"
        )
    if file is not None:
        yield f"first deviating tensor: {file.tensor} ({file.file}), {file.where}"
    yield _remedy(report)


def _remedy(report: ParityReport) -> str:
    weights = report.weights
    if weights.conflicts:
        return "the source is more than the folder, or contradicts itself, as listed above"
    if weights.differences or weights.missing:
        return "the folder was damaged or made of another checkpoint; convert it again"
    if weights.settings:
        return "the weights are right; a setting of config.ini listed above is not"
    if report.uncomputed:
        return "the folder's model could not be computed"
    return (
        "weights and settings are right: this is rounding beyond the tolerance (--tolerance), or "
        "the model is computed otherwise than its source; please report it"
    )


if __name__ == "__main__":
    sys.exit(main())
