"""`--multirun key=1,2,4`: a run for each combination of values, and a table at the end."""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ValueType

from launcher_scripts.configuration.diagnosis import hydra_text, read_override
from launcher_scripts.configuration.schema import Config
from launcher_scripts.console import Console
from launcher_scripts.rows import NamedRun, run_rows
from stages import record
from stages.progress import write_json

SUMMARY_NAME = "sweep.json"


def combinations(overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the command line of each combination by its values, and the problems of endless lists.

    A name such as `data_type=fp16,size=2` has the last part of each key.
    """
    swept: dict[str, list[str]] = {}
    fixed, problems = [], []
    for each in overrides:
        try:
            parsed = read_override(each)
        except ValueError:
            fixed.append(each)  # composing reports it
            continue
        if not parsed.is_sweep_override():
            fixed.append(each)
        elif parsed.is_discrete_sweep() and parsed.value_type is not ValueType.GLOB_CHOICE_SWEEP:
            swept[parsed.get_key_element()] = list(dict.fromkeys(parsed.sweep_string_iterator()))
        else:
            problems.append(f"{each}: list the values, as in {parsed.key_or_group}=1,2,4.")
    found = {}
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items())
        found[name] = [*fixed, *(f"{key}={value}" for key, value in chosen.items())]
    return found, problems


def with_folders(
    command_lines: Mapping[str, list[str]], configs: Mapping[str, Config]
) -> dict[str, list[str]]:
    """Return the command lines, with a results folder for each that has none of its own.

    `configs` are the configurations that they make, but for those that are wrong.
    """
    taken = Counter(each.results_dir for each in configs.values())
    found = {}
    for number, (name, words) in enumerate(command_lines.items(), start=1):
        own = []
        if name in configs and taken[folder := configs[name].results_dir] > 1:
            plain = re.sub(r"[^\w.]+", "-", name)
            own = [f"export.run.results_dir={hydra_text(str(folder / f'{number}-{plain}'))}"]
        found[name] = [*words, *own]
    return found


def run_and_compare(runs: Sequence[NamedRun], console: Console) -> int:
    """Run the combinations, show and save their comparison; return the first bad exit status."""
    config = runs[0].run.config
    status = run_rows(runs, console, wait=config.wait)
    results = [_result(each) for each in runs]
    names = list(dict.fromkeys(name for each in results for name in each["metrics"]))
    rows = [
        (
            each["name"],
            each["state"],
            *(f"{each['metrics'][n]:.4g}" if n in each["metrics"] else "-" for n in names),
            each["results_dir"],
        )
        for each in results
    ]
    console.say("\n" + console.table(("values", "state", *names, "results"), rows))
    path = Path(config.base_results_dir) / SUMMARY_NAME
    write_json(path, {"at": record.now(), "combinations": results})
    console.say(f"comparison: {path}")
    return status


def _result(each: NamedRun) -> dict[str, Any]:
    """Return what the records of a run say; its state is that of the last job that has one."""
    states = [found.state for found in each.run.records().values() if found is not None]
    results = each.run.results().values()
    return {
        "name": each.name,
        "results_dir": str(each.run.config.results_dir),
        "state": states[-1] if states else "finished earlier" if not each.run.jobs else "-",
        "exit_status": each.status,
        "metrics": {k: v for found in results for k, v in found.get("metrics", {}).items()},
    }
