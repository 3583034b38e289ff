"""The runs of one command: one, the rows of `action=upgrade`, or the combinations of a sweep.

All of them are checked before the first starts.
"""

import functools
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher_scripts import job_folder
from launcher_scripts.actions import jobs_in, note_last_run, problem_of_live_job
from launcher_scripts.configuration.checks import problems_of_settings
from launcher_scripts.configuration.compose import Composition
from launcher_scripts.configuration.effects import notes_of_effects, problems_of_effects
from launcher_scripts.configuration.evaluation_config import Context
from launcher_scripts.configuration.settings import CHECKOUT, EXIT_INTERRUPTED, EXIT_OK
from launcher_scripts.console import Console
from launcher_scripts.launchers import make_launcher
from launcher_scripts.launchers.base import Job
from launcher_scripts.launchers.slurm_state import SlurmQueue, queue_now
from launcher_scripts.pipeline import plan_pipeline
from launcher_scripts.run import Run
from stages.progress import DamagedFileError

_ROOM_WAIT_S, _ROOM_POLL_S = 60.0, 2.0


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
    before = jobs_in(config.results_dir, queue) if may_live else []
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


def prepare_rows(
    compositions: Mapping[str, Composition],
    words: Sequence[str],
    console: Console,
    problems: Sequence[str],
) -> tuple[list[Run], list[str]]:
    """Return the runs that have no problem, and the problems of all.

    Args:
        compositions: The configuration of each row by its name.
        words: The command line that the rows were given on.
        console: Receives remarks.
        problems: Those of the command line itself.
    """
    rows: list[Run] = []
    said: dict[str, list[str]] = {}
    queue = functools.cache(queue_now)
    for name, composition in compositions.items():
        found = [*problems, *composition.problems]
        run = prepare_run(composition, words, console, found, name=name, queue=queue)
        if run is not None:
            rows.append(run)
        for text in found:
            said.setdefault(text, []).append(name)
    wrong: list[str] = []
    for text, names in said.items():  # of all rows, or of some
        is_of_all = len(names) == len(compositions)
        wrong += [text] if is_of_all else [f"{each}: {text}" for each in names]
    if len(rows) > 1 and any(row.config.deploy.keep for row in rows):
        wrong.append("deploy.keep=true would keep the first run's server; leave it out.")
    reports = Counter(row.config.evaluate.output_dir for row in rows)
    wrong += [
        f"evaluate.output_dir={folder} would hold the reports of {count} runs; leave it out: each "
        "has a folder of its own."
        for folder, count in reports.items()
        if count > 1
    ]
    if rows and not wrong and not rows[0].only_renders:
        wrong += problems_of_room(rows)
    return rows, wrong


def problems_of_room(rows: Sequence[Run]) -> list[str]:
    """Return why the cluster would not take all jobs at once, unless they may wait for it."""
    room = rows[0].launcher.room()
    count = sum(len(row.jobs) for row in rows)
    if room is None or count <= room.free or rows[0].config.wait:
        return []
    return [f"the run has {count} jobs, {room}; wait=true submits them once there is room."]


def run_rows(rows: Sequence[Run], console: Console, *, wait: bool) -> int:
    """Run the rows, or put them into the queue; return the first bad exit status.

    In the foreground they run one after another. A queue gets all of them, with `wait` as soon as
    it has room, and then they are followed one after another. A row that fails does not stop the
    others.
    """
    heads = [f"\n[{number}/{len(rows)}] {row.name}" for number, row in enumerate(rows, start=1)]
    try:
        if not rows[0].launcher.in_foreground and (wait or len(rows) > 1):
            for number, row in enumerate(rows):
                if wait:
                    _wait_for_room(row, rows[:number])
                if row.name:
                    console.say(heads[number])
                row.status = row.submit_all()
        for head, row in zip(heads, rows, strict=True):
            if row.status is None or (row.status == EXIT_OK and wait):
                if row.name:
                    console.say(head)
                row.status = row.run_all(wait=wait)
            if row.status == EXIT_INTERRUPTED:
                break
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return next((row.status for row in rows if row.status), EXIT_OK)


def _wait_for_room(run: Run, earlier: Sequence[Run]) -> None:
    """Wait until the queue takes the jobs of a run, or nothing of this command is left in it."""
    deadline = time.monotonic() + _ROOM_WAIT_S  # a job that has ended leaves the queue later
    while (room := run.launcher.room()) is not None and room.free < len(run.jobs):
        if not all(each.has_ended() for each in earlier):
            deadline = time.monotonic() + _ROOM_WAIT_S
        elif time.monotonic() > deadline:
            return
        time.sleep(_ROOM_POLL_S)


def execute(
    runs: Sequence[Run], console: Console, start: Callable[[Sequence[Run], Console], int]
) -> int:
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
        return start(runs, console)
    except OSError as error:
        error.filename = error.filename or config.base_results_dir
        raise
