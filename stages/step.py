"""A job step: a stage in processes that a prefix command starts, such as srun with a container.

The parent process stays outside, where the scheduler's commands are available, and can be requeued;
the stage runs inside, in one process or several ranks. Two files connect them: the pickled stage,
and the first rank's result as JSON.
"""

from __future__ import annotations

import collections
import os
import pickle
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from foundations.files.replace import read_file, replace_file
from inference.system.launch_environment import (
    LAUNCHER_VARIABLE,
    LaunchEnvironment,
    read_launch_environment,
)
from inference.system.parent_process import end_process, stop_signals
from stages.base import Stage, StageError, Summary
from stages.job_process import (
    STOP_SIGNALS,
    assist,
    cause_of,
    log_line,
    node_name,
    restrict_umask,
    use_utc_log_times,
)
from stages.progress import read_as, write_json

_RANK_FAILURE = "rank-{rank}.txt"  # holds the reason; lies next to the result
_STOP_WAIT_S = 10.0
_WAKE_UP_S = 1.0
_TAIL_LINES = 12
_LOST_NODE = re.compile(r"srun: error: Node failure on (\S+)")
# srun's report of a failed task, and a task's output line with its number (--label).
_FAILURE = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)")
_LABEL = re.compile(r"(\d+): (.*)")
# Variables of a process that was started with an MPI flavour.
_MPI_VARIABLES = {"pmix": "PMIX_RANK", "pmi2": "PMI_RANK"}


@dataclass(frozen=True)
class JobStep:
    """The command that starts the processes of a stage.

    Attributes:
        prefix: command before the interpreter, such as `srun` with a container.
        python: interpreter inside the step.
        ranks: number of processes that the prefix starts.
        mpi: MPI flavour of the processes; None without MPI.
        launcher: the prefix's launcher, as `read_launch_environment` names it; "" to detect it.
        passed_variables: variables to pass on, which the processes would not inherit.
        variable_option: arguments that pass one variable, with the fields `{name}` and `{value}`.
        line_option: option of the prefix that takes the program as one shell command line.
    """

    prefix: tuple[str, ...]
    python: str = "python3"
    ranks: int = 1
    mpi: str | None = None
    launcher: str = "slurm"
    passed_variables: Sequence[str] = ()
    variable_option: Sequence[str] = ()
    line_option: str | None = None

    def command(
        self, stage: str, result: str, environment: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return the command that runs this module with the files of stage and result.

        Without `environment`, the values of passed variables are hidden, for display.
        """
        program = [self.python, "-u", "-m", "stages.step", stage, result, str(self.ranks)]
        if self.ranks > 1:
            program += [self.mpi or "none", self.launcher]
        if self.line_option is not None:
            program = [self.line_option, shlex.join(program)]
        values = dict.fromkeys(self.passed_variables, "...") if environment is None else environment
        variables = [
            word.format(name=name, value=values[name])
            for name in self.passed_variables
            if values.get(name)
            for word in self.variable_option
        ]
        return [*self.prefix, *variables, *program]


def run_in_step(stage: Stage, step: JobStep, *, folder: Path) -> Summary:
    """Run `stage` in separate processes and return its summary.

    Raises:
        StageError: the stage failed, or its processes ended without a result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stage_path, result_path = folder / "stage.pkl", folder / "result.json"
    for stale in (result_path, *folder.glob(_RANK_FAILURE.format(rank="*"))):
        stale.unlink(missing_ok=True)
    stage_path.write_bytes(pickle.dumps(stage))
    files = str(stage_path), str(result_path)
    process = subprocess.Popen(
        step.command(*files, os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    was_interrupted = False
    with _OutputReader(process.stdout) as output:
        try:
            # Wake up regularly: Python handles signals only in the main thread.
            while (status := process.poll()) is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_WAKE_UP_S)
        except KeyboardInterrupt:
            was_interrupted = True
            status = _end(process, stage)
        except BaseException:  # including SystemExit, by which submitit ends for a requeue
            _end(process, stage)
            raise
    result = read_as(result_path, _Result, "the result of a step")
    failed = result is None or bool(result.error)
    if failed and was_interrupted:
        raise KeyboardInterrupt
    # After the loss of another rank, srun stops the first one, which may end without an error.
    may_be_loss = result is None or result.error or (result.was_stopped and not was_interrupted)
    if may_be_loss and (loss := output.loss()):
        raise StageError(loss)
    for path in folder.glob(_RANK_FAILURE.format(rank="*")) if failed else ():
        raise StageError(read_file(path).decode())
    if result is None:
        raise StageError(
            f"the step ended with status {status} and without a result; its output is in the log. "
            f"Command: {shlex.join(step.command(*files))}"
        )
    if result.error:
        raise StageError(result.error, summary=result.summary, exit_code=result.exit_code)
    return result.summary


@dataclass(frozen=True)
class _Result:
    """The first rank's result: the stage's summary, and the reason if it failed."""

    summary: Summary
    error: str = ""
    exit_code: int = 0
    was_stopped: bool = False


class _OutputReader:
    """Forwards a step's output; keeps the last lines of its tasks and srun's failure reports."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._tails: dict[str, collections.deque[str]] = {}
        self._failures: list[tuple[str, str, str]] = []
        self._lost_nodes: list[str] = []
        self._thread = threading.Thread(target=self._read, name="step-output", daemon=True)

    def __enter__(self) -> _OutputReader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(_STOP_WAIT_S)

    def loss(self) -> str | None:
        """Return which node failed, or which rank failed first; None if the first rank did."""
        if self._lost_nodes:
            return f"node {', '.join(self._lost_nodes)} failed"
        if not self._failures:
            return None
        node, task, how = self._failures[0]  # later failures may be its consequences
        return None if _first_of(task) == "0" else self._description(node, task, how)

    def _description(self, node: str, task: str, how: str) -> str:
        lines = "".join(f"\n  | {line}" for line in self._tails.get(_first_of(task), ()))
        return f"rank {task} on {node} ended: {how}; its last lines:{lines}"

    def _read(self) -> None:
        for line in self._stream:
            with suppress(OSError):  # a full disk must not end the step
                sys.stdout.write(line)
                sys.stdout.flush()
            text = line.rstrip("\n")
            if end := _FAILURE.search(text):
                self._failures.append((end[1], end[2], end[3]))
            elif lost := _LOST_NODE.search(text):
                self._lost_nodes.append(lost[1])
            elif label := _LABEL.match(text):
                empty: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
                self._tails.setdefault(label[1], empty).append(label[2])


def _first_of(tasks: str) -> str:
    """Return the first number of srun's list of tasks, such as `1-3,5`."""
    return re.split("[-,]", tasks)[0]


def _end(process: subprocess.Popen[str], stage: Stage) -> int:
    """End the step, gracefully if the stage supports it, and return its status."""
    if not stage.ask_to_stop():
        process.terminate()
    grace_s = stage.stop_grace_s() + _STOP_WAIT_S
    with suppress(subprocess.TimeoutExpired):
        return process.wait(grace_s)
    return end_process(process, grace_s=_STOP_WAIT_S)


def check_place(place: LaunchEnvironment, *, ranks: int, mpi: str) -> None:
    """Check that a process knows that it is one of `ranks` ranks, and has the MPI flavour.

    Raises:
        StageError: it does not, and would run as a single process.
    """
    name = f"rank {place.rank} on {node_name()}"
    variable = _MPI_VARIABLES.get(mpi)
    if place.world_size != ranks:
        raise StageError(f"{name} sees {place.world_size} ranks instead of {ranks}")
    if variable is not None and variable not in os.environ:
        raise StageError(
            f"{name} has no {variable}: cluster.mpi={mpi} does not reach it, so every rank would "
            "believe it is alone; in a container, enable the PMI hook of enroot"
        )


def main(
    stage_path: Path, result_path: Path, ranks: int, mpi: str = "none", launcher: str = ""
) -> int:
    """Run a pickled stage; the first rank writes the result, the others assist."""
    restrict_umask()
    use_utc_log_times()
    stage = pickle.loads(stage_path.read_bytes())
    if ranks > 1:
        if launcher:  # ignore the variables of an outer launcher
            os.environ[LAUNCHER_VARIABLE] = launcher
        place = read_launch_environment(os.environ)
        if place.rank > 0:
            try:
                check_place(place, ranks=ranks, mpi=mpi)
                assist(stage, place)
            except StageError as error:
                log_line(str(error))
                path = result_path.with_name(_RANK_FAILURE.format(rank=place.rank))
                replace_file(path, f"rank {place.rank} failed: {error}")
                return error.exit_code
            return 0
    try:
        with stop_signals(*STOP_SIGNALS) as stopped:
            if ranks > 1:
                check_place(place, ranks=ranks, mpi=mpi)
            summary = stage()
    except (Exception, KeyboardInterrupt) as error:  # the parent process reports it
        details = error if isinstance(error, StageError) else StageError("")
        cause = cause_of(error, folder=result_path.parent)
        write_json(result_path, _Result(details.summary, cause, details.exit_code))
        raise
    write_json(result_path, _Result(summary, was_stopped=stopped.is_set()))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))
