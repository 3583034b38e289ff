"""Look after the jobs of a run from its records alone (status, logs, cancel), compare reports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from launcher_scripts.config import Config
from launcher_scripts.console import Console, table
from stages import STAGES, record
from stages.progress import read_json, write_json

LAST_RUN = "last_run.json"
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
_POLL_S = 0.3
_CANCEL_S = 60.0


def note_last_run(base_results_dir: Path, *results_dirs: Path) -> None:
    """Remember the results folders of the run, or of the sweep, that starts now."""
    values: dict[str, Any] = {"results_dir": str(results_dirs[-1]), "at": record.now()}
    if len(results_dirs) > 1:
        values["results_dirs"] = [str(each) for each in results_dirs]
    write_json(base_results_dir / LAST_RUN, values)


def look_after(config: Config, console: Console) -> int:
    """Do what `action` says for the last run, or for `run_dir`; return the exit status."""
    if config.action == "compare":
        return _compare(config, console)
    found = _run_dirs(config)
    if not found:
        console.say(
            f"no run is known in {config.base_results_dir}; give the results folder of one as "
            "run_dir=<folder>."
        )
        return EXIT_USAGE
    return max(_look_into(each, config.action, console) for each in found)


def _look_into(found: Path, action: str, console: Console) -> int:
    """Do what `action` says for the jobs of one results folder."""
    records = [each for each in (_read(found, name) for name in STAGES) if each is not None]
    if not records:
        console.say(f"run_dir={found} holds no jobs; give a folder with <stage>/job.json in it.")
        return EXIT_USAGE
    console.say(str(found))
    return _ACTIONS[action](found, records, console)


def _compare(config: Config, console: Console) -> int:
    """Print the differences of two evaluations and draw them in the run store."""
    from inference.compare import main as compare

    history_dir = config.evaluate.history_dir
    if len(config.runs) != 2 or history_dir is None:
        console.say(
            "action=compare needs two runs, such as runs=[latest~1,latest], and the run store "
            "they are kept in, evaluate.history_dir."
        )
        return EXIT_USAGE
    page = Path(history_dir) / "comparison.html"
    return compare([*config.runs, "--history-dir", history_dir, "--output", str(page)])


def _run_dirs(config: Config) -> list[Path]:
    """Return the results folders that are meant: of a sweep there are several."""
    if config.run_dir is not None:
        return [Path(config.run_dir)]
    last = read_json(Path(config.base_results_dir) / LAST_RUN)
    if last is None:
        return []
    return [Path(each) for each in last.get("results_dirs", [last["results_dir"]])]


def _read(results_dir: Path, stage: str) -> record.JobRecord | None:
    """Return a job's record, corrected by what the scheduler, or this machine, knows."""
    path = results_dir / stage / record.RECORD_NAME
    found = record.read_record(path)
    if found is None or found.is_final:
        return found
    if found.cluster == "bcm":
        from launcher_scripts.launchers.slurm_state import settle

        return settle(path)
    is_here = found.host == socket.gethostname()
    if is_here and found.process is not None and not Path(f"/proc/{found.process}").exists():
        return record.update_record(
            path, found.job_id, state=record.LOST, error="the job ended without a word"
        )
    return found


def _status(results_dir: Path, records: list[record.JobRecord], console: Console) -> int:
    del results_dir
    rows = [_row(each) for each in records]
    console.say(table(("stage", "job", "state", "node", "seconds", "exit", "log"), rows))
    for each in records:
        if each.error:
            console.say(f"{each.stage}: {each.error}")
    bad = (record.FAILED, record.LOST, record.CANCELLED)
    return EXIT_FAILED if any(each.state in bad for each in records) else EXIT_OK


def _logs(results_dir: Path, records: list[record.JobRecord], console: Console) -> int:
    """Print every job's log; of those that run, go on until they end."""
    for each in records:
        console.say(f"==> {each.stage}: {each.log}")
        path = Path(each.log)
        position = 0
        while True:
            ended = (_read(results_dir, each.stage) or each).is_final
            if path.exists():
                with path.open(encoding="utf-8", errors="replace") as log:
                    log.seek(position)
                    text = log.read()
                    position = log.tell()
                if text:
                    console.say(text.rstrip("\n"))
            if ended:
                break
            time.sleep(_POLL_S)
    return EXIT_OK


def _cancel(results_dir: Path, records: list[record.JobRecord], console: Console) -> int:
    """End every job that has not ended, the last of the chain first."""
    running = [each for each in records if not each.is_final]
    for each in reversed(running):
        if each.cluster == "bcm":
            subprocess.run(["scancel", each.job_id], check=False, timeout=_CANCEL_S)
        elif each.process is not None and each.host == socket.gethostname():
            os.kill(each.process, signal.SIGTERM)
        else:
            console.say(f"{each.stage} runs on {each.host}; cancel it there.")
        console.say(f"cancelling {each.stage} (job {each.job_id})")
    deadline = time.monotonic() + _CANCEL_S
    while time.monotonic() < deadline:
        again = [_read(results_dir, each.stage) for each in running]
        if all(each is None or each.is_final for each in again):
            return EXIT_OK
        time.sleep(_POLL_S)
    console.say(f"some jobs have not ended within {_CANCEL_S:g} s; see action=status")
    return EXIT_FAILED


_ACTIONS = {"status": _status, "logs": _logs, "cancel": _cancel}


def _row(found: record.JobRecord) -> tuple[str, ...]:
    code = "-" if found.exit_code is None else str(found.exit_code)
    facts = (found.stage, found.job_id, found.state, found.host or "-")
    return (*facts, _elapsed(found), code, found.log)


def _elapsed(found: record.JobRecord) -> str:
    if found.seconds is not None:
        return f"{found.seconds:.1f}"
    if not found.started_at:
        return "-"
    started = datetime.fromisoformat(found.started_at)
    return f"{(datetime.now(timezone.utc) - started).total_seconds():.0f}"
