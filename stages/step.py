"""Run a stage in another process that a prefix command starts, such as a step in a container.

The process that asks stays outside, where the scheduler's commands are, and can be requeued; the
stage runs inside. They meet in two files: the pickled stage, and the result as JSON.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from stages.base import Stage, StageError, Summary
from stages.progress import read_json, write_json

_STOP_WAIT_S = 10.0


@dataclass(frozen=True)
class Step:
    """How to start a process for a stage.

    Attributes:
        prefix: command in front of the interpreter, such as `srun` with a container.
        python: interpreter inside the step.
        line_flag: the prefix takes the command as one shell line after this, not as words.
        env_flag: variables are handed on by this and `NAME=value`; otherwise they are inherited.
        variables: names of those to hand on, as far as they are set.
    """

    prefix: tuple[str, ...]
    python: str = "python3"
    line_flag: tuple[str, ...] = ()
    env_flag: str | None = None
    variables: tuple[str, ...] = ()

    def command(self, *arguments: str) -> list[str]:
        """Return the whole command that runs this module with the arguments."""
        words = [self.python, "-u", "-m", "stages.step", *arguments]
        start = [*self.prefix]
        for name in self.variables:
            if self.env_flag is not None and name in os.environ:
                start += [self.env_flag, f"{name}={os.environ[name]}"]
        return [*start, *self.line_flag, shlex.join(words)] if self.line_flag else [*start, *words]


def run_in_step(stage: Stage, step: Step, *, folder: Path) -> Summary:
    """Run `stage` in a process of its own and return its summary.

    Raises:
        StageError: the stage failed, or its process ended without a result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stage_path, result_path = folder / "stage.pkl", folder / "result.json"
    result_path.unlink(missing_ok=True)
    stage_path.write_bytes(pickle.dumps(stage))
    command = step.command(str(stage_path), str(result_path))
    process = subprocess.Popen(command)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        status = _end(process, stage)
        if not result_path.exists():
            raise
    except BaseException:
        _end(process, stage)
        raise
    result = read_json(result_path)
    if result is None:
        raise StageError(
            f"the step ended with status {status} and without a result; its output is in the log. "
            f"Command: {shlex.join(command)}"
        )
    if "error" in result:
        error = StageError(result["error"], summary=result["summary"])
        error.exit_code = int(result["exit_code"])
        raise error
    return dict(result["summary"])


def _end(process: subprocess.Popen[bytes], stage: Stage) -> int:
    """End the step, in order where the stage listens, and return its status."""
    if not stage.ask_to_stop():
        process.terminate()
    grace_s = stage.stop_grace_s() + _STOP_WAIT_S
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(grace_s)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_STOP_WAIT_S)
    process.kill()
    return process.wait()


def main(stage_path: Path, result_path: Path) -> int:
    """Run the stage of a pickle and write its result."""
    from stages.job import cause_of, stop_signals

    stage: Stage = pickle.loads(stage_path.read_bytes())
    try:
        with stop_signals():
            summary = stage()
    except (Exception, KeyboardInterrupt) as error:
        told = error if isinstance(error, StageError) else StageError("")
        values = {"error": cause_of(error), "exit_code": told.exit_code, "summary": told.summary}
        write_json(result_path, values)
        raise
    write_json(result_path, {"summary": summary})
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
