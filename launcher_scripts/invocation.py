"""One command line from the plan to the exit status, and several for a sweep."""

from __future__ import annotations

import operator
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType

from export_scripts.files.disk import full_disk
from launcher_scripts import job_folder
from launcher_scripts.actions import already_serves, note_last_run
from launcher_scripts.configuration.checks import problems_of_settings
from launcher_scripts.configuration.compose import Composition
from launcher_scripts.configuration.schema import Config, keys
from launcher_scripts.configuration.settings import (
    CHECKOUT,
    EXIT_FAILED,
    EXIT_OK,
    FULL_ERROR,
    MEMORY_MEASURE,
    is_dry_run,
    is_set,
)
from launcher_scripts.console import Console
from launcher_scripts.launchers import make_launcher
from launcher_scripts.pipeline import plan_pipeline
from launcher_scripts.run import Run
from launcher_scripts.stage_table import Context, results_dir
from launcher_scripts.sweep import SUMMARY_NAME, Outcome, comparison, run_sweep, save
from stages import record
from stages.deploy_config import PYTORCH


@dataclass(frozen=True)
class Invocation:
    """One command line with its configuration, from the plan to the exit status."""

    composition: Composition
    words: Sequence[str]
    console: Console
    label: str = ""

    @property
    def config(self) -> Config:
        """The configuration, without which there is nothing to run."""
        assert self.composition.config is not None
        return self.composition.config

    def prepare(self, problems: list[str]) -> Run | None:
        """Return the jobs to run; add the problems found to `problems`."""
        config = self.config
        command = shlex.join(["python", "main.py", *self.words])
        revision = job_folder.git_revision(CHECKOUT)
        problems += problems_of_settings(config)
        try:
            plan = plan_pipeline(config, Context(command=command, git_revision=revision))
        except OSError as error:  # such as a folder without access, or a name that is too long
            # Only what was opened has no name in the error, and only a checkpoint is read here.
            source = f"export.model.checkpoint_path={config.export.model.checkpoint_path}"
            problems.append(f"{error.filename or source}: {error.strerror}.")
            return None
        stages = [each.stage for each in plan.to_run]
        launcher = make_launcher(config)
        problems += [*plan.problems, *launcher.check(stages)]
        servers = (each for each in stages if each.readiness_path() is not None)
        problems += filter(None, (already_serves(each.job.folder) for each in servers))
        if problems:
            return None
        finished = [f"{each.name}: {each.reason}" for each in plan.stages if not each.runs]
        for note in (
            *self.composition.notes,
            *plan.notes,
            *launcher.notes(stages),
            *_ignored(config),
            *finished,
        ):
            self.console.say(f"{self.label}: {note}" if self.label else note)
        resolved = self.composition.resolved
        whole = job_folder.repeatable(resolved)
        jobs = {
            each.name: job_folder.make_job(
                each.stage, config, resolved, git_revision=revision, whole_config=whole
            )
            for each in plan.to_run
        }
        return Run(launcher, self.console, plan.stages, jobs, keep_serving=config.deploy.keep)

    @property
    def only_renders(self) -> bool:
        """Return whether the jobs' files are written and nothing is started."""
        return is_dry_run(self.config) or make_launcher(self.config).only_renders

    def execute(self, run: Run) -> int:
        """Write the jobs' files, start the jobs and return the exit status."""
        try:
            self.begin(run)
            if self.only_renders:
                run.render()
                return EXIT_OK
            _end_in_order()
            return run.run_all(wait=self.config.wait)
        except OSError as error:
            return self.failed(error)

    def begin(self, run: Run) -> None:
        """Record the command in the results folder."""
        results = results_dir(self.config)
        if run.jobs:
            arguments = [sys.executable, str(CHECKOUT / "main.py"), *self.words]
            job_folder.note_command(results, arguments, at=record.now())
        if not self.only_renders:
            note_last_run(Path(self.config.base_results_dir), results)

    def failed(self, error: OSError) -> int:
        """Report an error of the file system; return the exit status.

        Raises:
            OSError: the error, if tracebacks are wanted, or if the reader of the output has left.
        """
        if isinstance(error, BrokenPipeError) or self.config.debug or is_set(FULL_ERROR):
            raise error
        place = Path(self.config.base_results_dir)
        plain = f"{error.filename or place}: {error.strerror}"
        sys.stderr.write(f"{full_disk(error, place) or plain}\n")
        return EXIT_FAILED


def run_all(
    invocations: Sequence[Invocation], outcomes: Sequence[Outcome], console: Console
) -> int:
    """Run prepared combinations of a sweep, show their comparison and return the exit status."""
    first = invocations[0]
    try:
        for invocation, outcome in zip(invocations, outcomes, strict=True):
            invocation.begin(outcome.run)
            if invocation.only_renders:
                outcome.run.render()
        if first.only_renders:
            return EXIT_OK
        _end_in_order()
        base = Path(first.config.base_results_dir)
        note_last_run(base, *(each.results_dir for each in outcomes))
        folder = base / f"sweep_{datetime.now():%m%d_%H%M%S}"
        status = run_sweep(outcomes, wait=first.config.wait, console=console, folder=folder)
        console.say(comparison(outcomes, console))
        path = base / SUMMARY_NAME
        save(outcomes, path)
        console.say(f"comparison: {path}")
        return status
    except OSError as error:
        return first.failed(error)


def _end_in_order() -> None:
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)


def _ignored(config: Config) -> list[str]:
    """Return a remark for each setting that is accepted without effect."""
    ignored = [
        key.name
        for key in keys()
        if key.is_ignored and operator.attrgetter(key.name)(config) != key.default
    ]
    if config.export.triton_deployment.enable_custom_all_reduce and config.deploy.engine == PYTORCH:
        ignored.append("export.triton_deployment.enable_custom_all_reduce")
    if is_set(MEMORY_MEASURE) and config.cluster_type != "bcm":
        ignored.append(MEMORY_MEASURE)
    return [f"{name} is accepted for compatibility and has no effect here" for name in ignored]


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Shut down as on Ctrl-C."""
    del frame
    raise KeyboardInterrupt(signal.Signals(signum).name)
