"""`action=upgrade`: evaluate several engines, versions or settings alike, and decide.

A row of `upgrade.rows` is a set of keys added to the command line; the first row is what serves
today. Each row is a separate run, on any cluster. All rows get the same samples and are judged
together against the first. A finished row is not run again.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foundations.files.json_content import Table
from foundations.values import name_problem, shown
from inference.evaluation.bounds import parse_bounds
from inference.evaluation.gate import EXIT_GATE_BREACHED, EXIT_INSUFFICIENT
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.run.checks import check_gate
from launcher_scripts.actions import jobs_in, live_job_problem
from launcher_scripts.configuration.diagnosis import decided_elsewhere, hydra_text, is_below
from launcher_scripts.configuration.schema import SECTIONS, Config
from launcher_scripts.configuration.settings import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from launcher_scripts.console import Console
from launcher_scripts.rows import run_rows
from launcher_scripts.run import Run
from stages.deploy_config import OPENAI, VLLM

# Keys of `evaluate` in which rows may differ: they say how a row's server is reached. All other
# keys of `evaluate` are the same for all rows.
_EVALUATE_KEYS = (
    "server", "protocol", "model", "tokenizer", "ca", "token_file", "openai.chat", "harness.url",
    "request_timeout_s", "retry_s",
)  # fmt: skip
# Further keys and sections that are the same for all rows.
_SHARED_KEYS = (
    "action",
    "stages",
    "cluster",
    "cluster_type",
    "base_results_dir",
    "export.run.results_dir",
    "wait",
    "data_dir",
    "dry_run",
    "run_dir",
    "deploy.keep",
    "watch",
    "upgrade",
    "export.accuracy",
)
_DECIDED = ("export.run.results_dir",)
# Names in upgrade.output_dir that a row must not have.
_TAKEN = ("junit.xml", "upgrade.html", "upgrade.json", "upgrade.md")
_POLL_S = 2.0  # each poll queries Slurm
_GATE_STATUSES = (EXIT_GATE_BREACHED, EXIT_INSUFFICIENT)  # exit statuses with a report


def problems_of_upgrade(config: Config, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the problems of the section `upgrade`, and of overrides that conflict with it."""
    rows = config.upgrade.rows
    options = EvaluationOptions(**vars(config.evaluate), data_dir=config.data_dir)
    found = check_gate(config.upgrade.gate, options)
    yield from (problem.replace("evaluate.gate", "upgrade.gate") for problem in found)
    yield from decided_elsewhere(overrides, _DECIDED, "action=upgrade decides it for each row")
    if find_spec("scipy") is None:
        yield "action=upgrade needs the package scipy: pip install scipy."
    if len(rows) < 2:
        yield (
            f"action=upgrade compares rows, and upgrade.rows has {len(rows)}; give the present "
            "server and its replacement, such as 'upgrade.rows={now:{},next:"
            "{deploy.executable:/venvs/next/bin/vllm}}'."
        )
    for name, keys in rows.items():
        wrong = "is that of an output file" if name in _TAKEN else name_problem(name)
        if wrong:
            yield f"upgrade.rows.{name}: the name of the row's folder {wrong}."
        if not isinstance(keys, Mapping):
            yield (
                f"upgrade.rows.{name}={shown(keys)} is not a mapping of keys to values, such as "
                "{deploy.engine: vllm}; {} runs the command line as it is."
            )
            continue
        yield from (
            f"upgrade.rows.{name}: {key} is the same for all rows; give it outside of upgrade.rows."
            for key, _ in _flat(keys)
            if not _may_differ(key)
        )


def _flat(keys: Table, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full names of a row's keys with their values; sections may be nested."""
    for key, value in keys.items():
        name = f"{prefix}{key}"
        if name in SECTIONS and isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _may_differ(key: str) -> bool:
    section, _, rest = key.partition(".")
    if section == "evaluate":
        return rest in _EVALUATE_KEYS
    return not is_below(key, _SHARED_KEYS)


def command_lines_of_rows(config: Config, overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return the command line of each row by row name; each has its own results folder.

    Rows and keys that `problems_of_upgrade` refuses are left out.
    """
    found = {}
    for name, keys in config.upgrade.rows.items():
        if not isinstance(keys, Mapping):
            continue
        results = hydra_text(str(config.upgrade.output_dir / name))
        own = {key: value for key, value in _flat(keys) if _may_differ(key)}
        engine = own.get("deploy.engine", config.deploy.engine)
        is_on = own.get("deploy.openai.enabled", config.deploy.openai.enabled)
        left_out = ["action", "upgrade"]
        if engine in (VLLM, OPENAI) or not is_on:
            left_out.append("deploy.openai")  # meant for rows that Slipway's own server serves
        words = [override for override in overrides if not is_below(override, left_out)]
        given = [f"{key}={_value(value)}" for key, value in own.items()]
        found[name] = [*words, *given, f"export.run.results_dir={results}"]
    return found


def wait_for_rows(config: Config, console: Console) -> None:
    """Wait until the rows' jobs that an earlier command left behind have ended."""
    folders = [config.upgrade.output_dir / name for name in config.upgrade.rows]
    while alive := [
        f"{folder.name}: the job {job.job_id} of {job.stage}"
        for folder in filter(Path.is_dir, folders)
        for job in jobs_in(folder)
        if live_job_problem(job, folder)
    ]:
        for text in alive:
            console.say_once(f"{text} is still running; waiting for its end")
        time.sleep(_POLL_S)


def _value(value: Any) -> str:
    """Return a value in Hydra's grammar."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_value(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_value, value)) + "]"
    return hydra_text(value) if isinstance(value, str) else json.dumps(value)


def run_and_decide(config: Config, rows: Sequence[Run], console: Console) -> int:
    """Run the rows and judge them; return the exit status.

    Queued jobs are not judged without `wait`: the same command judges them once they have ended.
    """
    from inference.compare import decide

    folder = config.upgrade.output_dir
    status = run_rows(rows, console, wait=config.wait)
    if status == EXIT_INTERRUPTED:
        return status
    queued = [row for row in rows if row.jobs and not row.launcher.in_foreground]
    if queued and not config.wait:
        console.say("\nthe rows are queued; once they have ended, the same command judges them")
        return status
    bounds, _ = parse_bounds(config.upgrade.gate)
    try:
        text, decision = decide(dict(map(_result, rows)), bounds, folder)
    except ValueError as error:
        reason = str(error).replace("evaluate.gate", "upgrade.gate")
        console.say(f"\nnothing is decided: {reason}")
        return status or EXIT_FAILED
    console.say(f"\n{text}\n\npage: {folder / 'upgrade.html'}")
    return decision


def _result(row: Run) -> tuple[str, Any]:
    """Return a row's name, and its evaluation or the reason why it has none."""
    from inference.evaluation.report.files import read_run

    if row.status not in (EXIT_OK, *_GATE_STATUSES):
        return row.name, "; ".join(_errors(row)) or f"it ended with status {row.status}"
    try:
        return row.name, read_run(row.config.evaluate.output_dir / "report.json")
    except (OSError, ValueError) as error:
        return row.name, str(error)


def _errors(row: Run) -> Iterator[str]:
    for stage, found in row.records().items():
        if found is not None and found.error.strip():
            first, *others = filter(None, map(str.strip, found.error.splitlines()))
            yield f"{stage}: {' ... '.join([first, *others[-1:]])}"
