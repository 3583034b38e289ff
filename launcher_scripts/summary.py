"""The table of stages and their results at the end of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from launcher_scripts.console import Console
from launcher_scripts.pipeline import PlannedStage
from stages import record
from stages.base import Stage

# Of the jobs that were submitted, by stage name.
Records = Mapping[str, record.JobRecord | None]


def summary(planned: Sequence[PlannedStage], records: Records, console: Console) -> str:
    """Return the table of stages, and their results below it."""
    rows = [(each.name, *_row(each, records)) for each in planned]
    lines = ["", console.table(("stage", "state", "seconds", "outputs"), rows)]
    lines += [f"results: {each.stage.job.folder.parent}" for each in planned[:1]]
    for each in planned:
        lines += _findings(each.name, _found_by(each, records))
    return "\n".join(lines)


def metrics(planned: Sequence[PlannedStage], records: Records) -> dict[str, float]:
    """Return the figures of the stages, by name."""
    found: dict[str, float] = {}
    for each in planned:
        found |= _found_by(each, records).get("metrics", {})
    return found


def _row(each: PlannedStage, records: Records) -> tuple[str, str, str]:
    outputs = _shown_outputs(each.stage)
    if not each.runs:
        return each.state, "-", outputs
    if each.name not in records:
        return "not started", "-", "-"
    found = records[each.name]
    state = found.state if found else record.LOST
    seconds = "-" if found is None or found.seconds is None else f"{found.seconds:.1f}"
    return state, seconds, outputs if state == record.COMPLETED else "-"


def _found_by(each: PlannedStage, records: Records) -> dict[str, Any]:
    if not each.runs:
        return each.finding.marker.summary if each.finding.marker else {}
    found = records.get(each.name)
    return found.summary if found else {}


def _findings(name: str, found: Mapping[str, Any]) -> list[str]:
    lines = [f"{name}: {remark}" for remark in found.get("remarks", ())]
    compared = found.get("references", {})
    for metric, value in found.get("metrics", {}).items():
        reference = f" ({compared[metric]})" if metric in compared else ""
        lines.append(f"{metric}: {value:.4g}{reference}")
    lines += [f"{task}: {text}" for task, text in found.get("times", {}).items()]
    if "report" in found:
        lines.append(f"report: {found['report']}")
    return lines


def _shown_outputs(stage: Stage) -> str:
    """Return the stage's outputs, or the folder of several, relative to the results folder."""
    base, paths = stage.job.folder.parent, stage.outputs()
    levels = (0, 1) if len(paths) > 1 else ()
    folders = ([*{path.parents[level] for path in paths}] for level in levels)
    places = next((each for each in folders if len(each) == 1), paths)
    shown = (path.relative_to(base) if path.is_relative_to(base) else path for path in places)
    return ", ".join(map(str, shown)) or "-"
