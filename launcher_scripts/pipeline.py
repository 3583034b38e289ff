"""The plan of a run: its stages, their order, and their dependencies."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from foundations.suggest import did_you_mean
from launcher_scripts.configuration.evaluation_config import Context
from launcher_scripts.configuration.schema import Config
from launcher_scripts.stage_table import build_stage
from stages import STAGES
from stages.base import Finding, Stage
from stages.deploy_config import OPENAI, VLLM, is_store_url


@dataclass(frozen=True)
class PlannedStage:
    """A stage of the pipeline.

    Attributes:
        finding: the state of its outputs on disk.
        state, reason: why no job is submitted for it; empty if one is.
        needed_by: the stage that needs its outputs, if it was not requested itself.
    """

    stage: Stage
    finding: Finding
    state: str = ""
    reason: str = ""
    needed_by: str | None = None

    @property
    def name(self) -> str:
        """Name of the stage."""
        return self.stage.name

    @property
    def runs(self) -> bool:
        """Whether a job is submitted for it."""
        return not self.state


@dataclass(frozen=True)
class Plan:
    """The stages in pipeline order, and every problem that prevents them from running."""

    stages: Sequence[PlannedStage]
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def to_run(self) -> list[PlannedStage]:
        """The stages that get a job."""
        return [stage for stage in self.stages if stage.runs]


def read_stages(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the requested stages in pipeline order, and a problem for each unknown one."""
    problems = [
        f"stages names {name!r}, which is not a stage{did_you_mean(name, STAGES)}; "
        f"known stages: {', '.join(STAGES)}."
        for name in names
        if name not in STAGES
    ]
    if not names:
        problems.append(f"stages is empty; name at least one of {', '.join(STAGES)}.")
    return [name for name in STAGES if name in names], problems


def plan_pipeline(config: Config, context: Context) -> Plan:
    """Return the plan, without starting anything."""
    measures = config.export.accuracy.enabled and "export" in config.stages
    requested, problems = read_stages([*config.stages, *["evaluate"] * measures])
    problems += _drop_export(requested, config.deploy.engine)
    before = (_prerequisite(name, config) for name in requested)
    context = replace(context, stages=frozenset(filter(None, (*requested, *before))))
    # Stages are chosen from the last to the first. Each maps to the stage that needs it, or to
    # None if it was requested.
    needed_by = dict.fromkeys(requested)
    chosen: list[Stage] = []
    for name in reversed(_stage_order(config)):
        if name not in needed_by:
            continue
        with _errors_in(problems, config):
            stage = build_stage(name, config, context)
            if needed_by[name] is None or not _has_outputs(stage):
                chosen.insert(0, stage)
                if (earlier := _prerequisite(name, config)) is not None:
                    needed_by.setdefault(earlier, name)
    planned: dict[str, PlannedStage] = {}
    for stage in chosen:
        with _errors_in(problems, config):
            planned[stage.name] = _planned(stage, planned, needed_by[stage.name])
    evaluate = planned.get("evaluate")
    if "deploy" in planned and evaluate and not (evaluate.runs or config.deploy.keep):
        reason = "not needed: the evaluation is finished"  # no other stage needs the server
        planned["deploy"] = replace(planned["deploy"], state="not needed", reason=reason)
    plan, notes = Plan([*planned.values()]), list[str]()
    for each in plan.to_run:
        with _errors_in(problems, config):
            problems += each.finding.problems
            problems += each.stage.check()
            if not config.is_dry_run:
                problems += each.stage.missing_now()
            notes += _notes(each)
    return replace(plan, problems=[*dict.fromkeys(problems)], notes=notes)


@contextmanager
def _errors_in(problems: list[str], config: Config) -> Iterator[None]:
    """Add an error of the block to the problems, so that those of other stages are found as well.

    A ValueError may be a damaged file's; an error of the file system for example that a folder is
    not accessible, or a name is too long.
    """
    try:
        yield
    except ValueError as error:
        problems.append(str(error))
    except OSError as error:
        # An error without a file name comes from reading an open file: only the checkpoint is read.
        source = f"export.model.checkpoint_path={config.export.model.checkpoint_path}"
        problems.append(f"{error.filename or source}: {error.strerror}.")


def _stage_order(config: Config) -> list[str]:
    """Return all stages in order; with `certify.serve`, certify follows export."""
    names = [*STAGES]
    if config.certify.serve:
        names.remove("certify")
        names.insert(names.index("export") + 1, "certify")
    return names


def _drop_export(requested: list[str], engine: str) -> list[str]:
    """Remove `export` if the engine serves no repository, and return that as a problem."""
    if "export" not in requested or engine not in (VLLM, OPENAI):
        return []
    requested.remove("export")
    remedy = f"set stages=[{','.join(requested)}]" if requested else "leave deploy.engine out"
    return [
        f"deploy.engine={engine} serves the folder of convert.format=huggingface, and export makes "
        f"a repository of shards: {remedy}."
    ]


def _notes(planned: PlannedStage) -> Iterator[str]:
    """Yield why a stage runs that was not requested or was finished, and its own notes."""
    if planned.needed_by:
        yield (
            f"{planned.needed_by} needs {planned.stage.outputs()[0]}, which is missing: "
            f"{planned.name} runs first"
        )
    for change in planned.finding.changes[:3]:
        yield f"{planned.name} runs again: {change} it was done"
    yield from planned.stage.notes()


def _prerequisite(name: str, config: Config) -> str | None:
    """Return the stage whose outputs a stage reads; None if its inputs come from elsewhere."""
    if name in ("convert", "export"):
        return "convert" if name == "export" else None
    if name == "certify" and not config.certify.serve:
        return "convert" if config.certify.folder is None else None
    if name == "evaluate" and config.evaluate.server is not None:
        return None
    if name == "deploy" and config.cluster_type == "kubernetes":
        return None  # pods serve the contents of their volume
    repository = config.deploy.repository
    if config.convert.is_adapter:
        return "convert"
    if config.deploy.engine in (VLLM, OPENAI):  # these serve a Hugging Face folder
        return "convert" if repository is None else None
    # `export` publishes the repository to an object store.
    return "export" if repository is None or is_store_url(repository) else None


def _has_outputs(stage: Stage) -> bool:
    """Return whether the outputs are usable: finished, or made by other means and undamaged."""
    finding = stage.finding()
    if finding.marker is not None or finding.problems:
        return finding.marker is not None
    marker = stage.marker_path()
    is_marked = marker is not None and marker.exists()
    is_complete = all(path.exists() for path in stage.outputs())
    return stage.accepts_unmarked and not is_marked and is_complete and not stage.damage()


def _planned(stage: Stage, before: dict[str, PlannedStage], needed_by: str | None) -> PlannedStage:
    """Decide whether a stage runs: not if it is finished and no earlier stage runs again."""
    finding = stage.finding()
    is_fresh = not any(
        earlier.runs
        for earlier in before.values()
        if earlier.stage.marker_path() is not None
        and earlier.name != "certify"  # it changes no inputs
    )
    if stage.job.overwrite:
        finding = Finding()
    if finding.marker is not None and is_fresh:
        reason = f"finished at {finding.marker.finished_at}"
        return PlannedStage(stage, finding, "finished earlier", reason, needed_by)
    return PlannedStage(stage, finding, needed_by=needed_by)
