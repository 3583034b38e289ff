"""The files around a job: its configuration, script, command line and record."""

import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import to_jsonable_python

from launcher_scripts.configuration.schema import Config
from launcher_scripts.launchers.base import Job, Launcher, SubmissionError
from stages import record
from stages.progress import write_json


def as_yaml(record: Any) -> str:
    """Return the configuration, or a section of it, as YAML in the order of its keys."""
    values = to_jsonable_python(record)
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=False, allow_unicode=True)


def repeatable(config: Config) -> str:
    """Return the whole configuration as YAML that repeats the run; dry_run is off in it."""
    return as_yaml(replace(config, dry_run=False))


def record_command(results_dir: Path, arguments: Sequence[str], *, at: str) -> None:
    """Append the command line to launcher_cmd.log; create the results folder."""
    (results_dir / "results").mkdir(parents=True, exist_ok=True)
    with (results_dir / "launcher_cmd.log").open("a", encoding="utf-8") as log:
        log.write(f"# {at}\n" + " \\\n  ".join(arguments) + "\n")


def write_job_files(
    job: Job, launcher: Launcher, after: str, *, records: Sequence[Path] = ()
) -> list[Path]:
    """Write the configuration and the script of a job, and return their paths.

    If such files of an earlier run differ, or it left `records`, all of these are first moved to a
    new folder below `runs`: only once the new files are on the disk, which may be full.
    """
    folder = job.folder
    files = {
        folder / f"{job.name}_config.yaml": repeatable(job.config),
        folder / f"{job.full_name}_{launcher.script_name}": launcher.render(job, after),
    }
    others = [
        path for path, text in files.items() if path.exists() and path.read_bytes() != text.encode()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as place:
        new = {path: Path(place, path.name) for path in files}
        for path, text in files.items():
            new[path].write_text(text, encoding="utf-8")
        if others or any(map(Path.exists, records)):
            places = (folder / "runs" / str(number) for number in count(1))
            kept = next(each for each in places if not each.exists())
            kept.mkdir(parents=True)
            for path in filter(Path.exists, (*files, *records)):
                path.rename(kept / path.name)
        for path, written in new.items():
            written.rename(path)
    return list(files)


def prepare_submission(
    job: Job, launcher: Launcher, after: str, before: record.JobRecord | None = None
) -> None:
    """Write the files and the record of a job about to be submitted; earlier ones are archived.

    Raises:
        SubmissionError: another command has submitted a job of the stage since `before` was read.
    """
    path, progress = job.record_path, job.stage.job.progress_path
    with record.locked(path):
        found = record.readable_record(path)
        if found is not None and not found.is_final and found != before:
            raise SubmissionError(
                f"another command has submitted {found.stage} in {job.folder} in the meantime"
            )
        write_job_files(job, launcher, after, records=(path, progress))
        new = record.JobRecord(
            job_id="",
            stage=job.stage.name,
            name=job.name,
            state=record.SUBMITTED,
            cluster=launcher.name,
            dependency=after,
            # Until the job has an id, host and process are those of the submitting command.
            host=socket.gethostname(),
            process=os.getpid(),
            submitted_at=record.now(),
            git_revision=job.git_revision,
            outputs=tuple(str(path) for path in job.stage.outputs()),
        )
        write_json(path, new)


def git_revision(checkout: Path) -> str:
    """Return the commit of the checkout, with `-dirty` if it has changes; empty without git."""
    if not (checkout / ".git").exists():
        return ""  # an installed package may lie inside another project's checkout
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
