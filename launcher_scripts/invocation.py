"""The jobs that one command line asks for, or every reason why they cannot run; their start."""

import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher_scripts import job_folder
from launcher_scripts.actions import jobs_in, note_last_run, problem_of_live_job
from launcher_scripts.configuration.checks import problems_of_settings
from launcher_scripts.configuration.compose import Composition
from launcher_scripts.configuration.effects import notes_of_effects, problems_of_effects
from launcher_scripts.configuration.evaluation_config import Context
from launcher_scripts.configuration.settings import (
    CHECKOUT,
    EXIT_OK,
)
from launcher_scripts.console import Console
from launcher_scripts.launchers import make_launcher
from launcher_scripts.launchers.base import Job
from launcher_scripts.launchers.slurm_state import SlurmQueue, queue_now
from launcher_scripts.pipeline import plan_pipeline
from launcher_scripts.run import Run
from stages.progress import DamagedFileError


def prepare_run(
    composition: Composition,
    words: Sequence[str],
    console: Console,
    problems: list[str],
    *,
    name: str = "",
    queue: Callable[[], SlurmQueue] = queue_now,
) -> Run | None:
    """Return the jobs that a command line asks for; add the problems found to `problems`.

    `name` is that of the run among several; `queue` asks Slurm for its jobs.
    Without a configuration there is nothing to run.
    """
    config = composition.config
    if config is None:
        return None
    command = shlex.join(["python", "main.py", *words])
    revision = job_folder.git_revision(CHECKOUT)
    problems += [*problems_of_settings(config), *problems_of_effects(config)]
    try:
        plan = plan_pipeline(config, Context(command=command, git_revision=revision))
    except DamagedFileError as error:
        problems.append(str(error))
        return None
    except OSError as error:  # such as a folder without access, or a name that is too long
        # Only what was opened has no name in the error, and only a checkpoint is read here.
        source = f"export.model.checkpoint_path={config.export.model.checkpoint_path}"
        problems.append(f"{error.filename or source}: {error.strerror}.")
        return None
    stages = [planned.stage for planned in plan.to_run]
    launcher = make_launcher(config)
    problems += [*plan.problems, *launcher.check(stages)]
    may_live = config.cluster_type == "bcm" or config.results_dir.is_dir()
    before = jobs_in(config.results_dir, queue, passes_damage=True) if may_live else []
    wanted = {stage.name: stage.job.folder for stage in stages}
    alive = ((job, wanted[job.stage]) for job in before if job.stage in wanted)
    problems += filter(None, (problem_of_live_job(*each) for each in alive))
    if not config.is_dry_run and not problems:
        problems += [problem for stage in stages for problem in stage.unreachable()]
    if problems:
        return None
    finished = [f"{stage.name}: {stage.reason}" for stage in plan.stages if not stage.runs]
    notes = (
        *plan.notes,
        *launcher.notes(stages),
        *notes_of_effects(config),
        *finished,
    )
    for note in notes:
        console.say(f"{name}: {note}" if name else note)
    jobs = {stage.name: Job(stage, config, revision) for stage in stages}
    earlier = {job.stage: job for job in before}
    return Run(launcher, console, plan.stages, jobs, words, earlier, name=name)


def execute(runs: Sequence[Run], start: Callable[[], int]) -> int:
    """Write the files of runs, and `start` them unless a dry run or a user does; return the status.

    Raises:
        OSError: an error of the file system, with a path, or the reader of the output has left.
    """
    config = runs[0].config
    try:
        for run in runs:
            run.begin()
            if run.only_renders:
                run.render()
        if runs[0].only_renders:
            return EXIT_OK
        note_last_run(Path(config.base_results_dir), *(run.config.results_dir for run in runs))
        for signum in (signal.SIGTERM, signal.SIGHUP):
            if signum == signal.SIGTERM or signal.getsignal(signum) != signal.SIG_IGN:  # by nohup
                signal.signal(signum, signal.default_int_handler)  # as Ctrl-C
        return start()
    except OSError as error:
        error.filename = error.filename or config.base_results_dir
        raise
