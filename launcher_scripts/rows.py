"""The runs of one command: a single one, the rows of `action=upgrade`, or a sweep's combinations.

All runs are checked before the first one starts.
"""

import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from launcher_scripts import job_folder
from launcher_scripts.actions import jobs_in, live_job_problem, record_last_run
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

_SLOTS_WAIT_S, _SLOTS_POLL_S = 60.0, 2.0


def prepare_run(
    composition: Composition,
    words: Sequence[str],
    console: Console,
    *,
    known: Sequence[str] = (),
    name: str = "",
    queue: Callable[[], SlurmQueue] = queue_now,
) -> tuple[Run | None, list[str]]:
    """Return the run of a composed command line, or None if it has problems; and its problems.

    Args:
        composition: Configuration of the run.
        words: The command line.
        console: Receives notes.
        known: Problems of the command line.
        name: Distinguishes the run among several.
        queue: Returns Slurm's queue.
    """
    problems = [*known, *composition.problems]
    if (config := composition.config) is None:
        return None, problems
    command = shlex.join(["python", "main.py", *words])
    revision = job_folder.git_revision(CHECKOUT)
    plan = plan_pipeline(config, Context(command=command, git_revision=revision))
    stages = [planned.stage for planned in plan.to_run]
    launcher = make_launcher(config)
    found = [*problems_of_settings(config), *problems_of_effects(config), *plan.problems]
    found += launcher.check(stages)
    may_live = config.cluster_type == "bcm" or config.results_dir.is_dir()
    before = jobs_in(config.results_dir, queue) if may_live else []
    jobs = {stage.name: Job(stage, config, revision) for stage in stages}
    alive = (live_job_problem(job, config.results_dir) for job in before if job.stage in jobs)
    found += filter(None, alive)
    # No user wrote the default that stands in for a refused value.
    refused = tuple(f"{key}=" for key in composition.refused)
    problems += [text for text in found if not any(key in text for key in refused)]
    if problems:
        return None, problems
    finished = [f"{stage.name}: {stage.reason}" for stage in plan.stages if not stage.runs]
    notes = (
        *plan.notes,
        *launcher.notes(stages),
        *notes_of_effects(config),
        *finished,
    )
    for note in notes:
        console.say(f"{name}: {note}" if name else note)
    earlier = {job.stage: job for job in before}
    return Run(launcher, console, plan.stages, jobs, words, earlier, name=name), []


def prepare_rows(
    compositions: Mapping[str, Composition],
    words: Sequence[str],
    console: Console,
    problems: Sequence[str],
) -> tuple[list[Run], list[str]]:
    """Return the runs without problems, and the problems of all rows.

    Args:
        compositions: Configuration of each row, by row name.
        words: The command line of all rows.
        console: Receives notes.
        problems: Problems of the command line itself.
    """
    rows: list[Run] = []
    rows_with: dict[str, list[str]] = {}  # problem -> names of the rows that have it
    queue = cache(queue_now)
    for name, composition in compositions.items():
        run, found = prepare_run(
            composition, words, console, known=problems, name=name, queue=queue
        )
        if run is not None:
            rows.append(run)
        for text in dict.fromkeys(found):
            rows_with.setdefault(text, []).append(name)
    wrong = []
    for text, names in rows_with.items():
        all_have_it = len(names) == len(compositions)
        wrong += [text] if all_have_it else [f"{name}: {text}" for name in names]
    configs = [each.config for each in compositions.values() if each.config]
    if len(configs) > 1 and any(config.deploy.keep for config in configs):
        wrong.append("deploy.keep=true would keep the first run's server; leave it out.")
    reports = Counter(config.evaluate.output_dir for config in configs)
    wrong += [
        f"evaluate.output_dir={folder} would hold the reports of {count} runs; leave it out: by "
        "default each run has its own folder."
        for folder, count in reports.items()
        if count > 1
    ]
    if rows and not wrong and not rows[0].only_renders:
        wrong += queue_problems(rows)
    return rows, wrong


def queue_problems(rows: Sequence[Run]) -> list[str]:
    """Return why the queue cannot take all jobs at once; nothing with `wait=true`."""
    slots = rows[0].launcher.queue_slots()
    count = sum(len(row.jobs) for row in rows)
    if slots is None or count <= slots.free or rows[0].config.wait:
        return []
    return [f"the run has {count} jobs, but {slots}; wait=true submits them as slots become free."]


def run_rows(rows: Sequence[Run], console: Console, *, wait: bool) -> int:
    """Run the rows, or queue their jobs; return the first exit status that is not 0.

    In the foreground, rows run one after another. On a cluster, the jobs of all rows are queued;
    with `wait`, each row waits for free queue slots, and the rows are then followed one after
    another. A row that fails does not stop the others.
    """
    heads = [f"\n[{number}/{len(rows)}] {row.name}" for number, row in enumerate(rows, start=1)]
    try:
        if not rows[0].launcher.in_foreground and (wait or len(rows) > 1):
            for number, row in enumerate(rows):
                if wait:
                    _wait_for_slots(row, rows[:number])
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


def _wait_for_slots(run: Run, earlier: Sequence[Run]) -> None:
    """Wait until the queue has slots for a run, or all earlier jobs of this command have ended."""
    deadline = time.monotonic() + _SLOTS_WAIT_S  # an ended job leaves the queue with a delay
    while (slots := run.launcher.queue_slots()) is not None and slots.free < len(run.jobs):
        if not all(other.has_ended() for other in earlier):
            deadline = time.monotonic() + _SLOTS_WAIT_S
        elif time.monotonic() > deadline:
            return
        time.sleep(_SLOTS_POLL_S)


def execute(
    runs: Sequence[Run], console: Console, start: Callable[[Sequence[Run], Console], int]
) -> int:
    """Write the runs' files and `start` the runs; return the exit status.

    A dry run, or a launcher that only renders, starts nothing.

    Raises:
        OSError: an error of the file system, with its path, or the output's reader is gone.
    """
    config = runs[0].config
    try:
        for run in runs:
            run.begin()
            if run.only_renders:
                run.render()
        if runs[0].only_renders:
            return EXIT_OK
        record_last_run(config.base_results_dir, *(run.config.results_dir for run in runs))
        return start(runs, console)
    except OSError as error:
        error.filename = error.filename or str(config.results_dir)
        raise
