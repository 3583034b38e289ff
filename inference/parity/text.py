"""A comparison as text: the table of parts, the first deviation, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inference.parity.activations import ActivationDifference
from inference.parity.comparison import ParityReport
from inference.parity.weights import FileDifference

_MOST_LISTED = 20


def parity_text(report: ParityReport) -> str:
    """Return the whole report, the verdict last."""
    lines = [
        f"source   {report.checkpoint} ({report.source or report.weights.title})",
        f"folder   {report.ft_dir} ({report.folder})",
        *_weights(report),
    ]
    if report.activations:
        lines += ["", *_table(report.activations)]
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
    yield from _listed([_file_line(each) for each in weights.differences])
    yield from _listed([f"{name} is missing" for name in weights.missing])
    yield from _listed(
        [f"{name} is not of this source; not compared" for name in weights.not_compared]
    )
    yield from _listed([f"config.ini: {setting}" for setting in weights.settings])


def _file_line(each: FileDifference) -> str:
    return (
        f"{each.where}: {each.file}: {each.differing:,} of {each.values:,} values differ, by up to "
        f"{each.max_abs:.3g}"
    )


def _listed(lines: Sequence[str]) -> Iterator[str]:
    for line in lines[:_MOST_LISTED]:
        yield f"         {line}"
    if len(lines) > _MOST_LISTED:
        yield f"         ... and {len(lines) - _MOST_LISTED} more like these"


def _table(rows: Sequence[ActivationDifference]) -> list[str]:
    width = max(len(each.place.where) for each in rows)
    head = f"{'layer':{width}}  {'part':15}  {'max abs':>9}  {'mean abs':>9}  {'relative':>9}"
    lines = [f"{head}  tolerance"]
    for each in rows:
        numbers = f"{each.max_abs:9.2e}  {each.mean_abs:9.2e}  {each.relative:9.2e}"
        mark = f"  {each.tolerance:9.1e}{'  deviates' * each.deviates}"
        lines.append(f"{each.place.where:{width}}  {each.place.part:15}  {numbers}{mark}")
    return lines


def _verdict(report: ParityReport) -> Iterator[str]:
    place, file = report.first_place, report.first_file
    if report.equal:
        yield "equal within the tolerance" if report.activations else "equal: every weight"
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
