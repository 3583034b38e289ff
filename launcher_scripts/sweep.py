"""`--multirun key=1,2,4`: a run for each combination of values, and a table at the end."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ValueType

from launcher_scripts.configuration.compose import Composition
from launcher_scripts.configuration.diagnosis import hydra_text, read_override
from launcher_scripts.console import Console
from launcher_scripts.rows import run_rows
from launcher_scripts.run import Run
from stages import record
from stages.progress import write_json

SUMMARY_NAME = "sweep.json"


def combinations(overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the command line of each combination by its values, and the problems of endless lists.

    A name such as `data_type=fp16,size=2` has the last part of each key.
    """
    swept: dict[str, list[str]] = {}
    fixed, problems = [], []
    for override in overrides:
        try:
            parsed = read_override(override)
        except ValueError:
            fixed.append(override)  # composing reports it
            continue
        if not parsed.is_sweep_override():
            fixed.append(override)
        elif parsed.is_discrete_sweep() and parsed.value_type is not ValueType.GLOB_CHOICE_SWEEP:
            swept[parsed.get_key_element()] = list(dict.fromkeys(parsed.sweep_string_iterator()))
        else:
            problems.append(f"{override}: list the values, as in {parsed.key_or_group}=1,2,4.")
    found = {}
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items())
        found[name] = [*fixed, *(f"{key}={value}" for key, value in chosen.items())]
    return found, problems


def compositions_of_sweep(
    overrides: Sequence[str], compose: Callable[[Sequence[str]], Composition]
) -> tuple[dict[str, Composition], list[str]]:
    """Return the configuration of each combination by its values, and the problems of all.

    Those that would share a results folder get one each.
    """
    command_lines, problems = combinations(overrides)
    found = {name: compose(words) for name, words in command_lines.items()}
    folders = {name: each.config.results_dir for name, each in found.items() if each.config}
    taken = Counter(folders.values())
    for number, (name, words) in enumerate(command_lines.items(), start=1):
        if name in folders and taken[folder := folders[name]] > 1:
            plain = re.sub(r"[^\w.]+", "-", name)
            own = hydra_text(str(folder / f"{number}-{plain}"))
            found[name] = compose([*words, f"export.run.results_dir={own}"])
    problems += [
        f"--multirun with action={each}: it runs; leave one of them out."
        for each in {one.config.action for one in found.values() if one.config} - {"run"}
    ]
    return found, problems


def run_and_compare(runs: Sequence[Run], console: Console) -> int:
    """Run the combinations, show and save their comparison; return the first bad exit status."""
    config = runs[0].config
    status = run_rows(runs, console, wait=config.wait)
    results = [_result(run) for run in runs]
    names = list(dict.fromkeys(name for result in results for name in result["metrics"]))
    rows = [
        (
            result["name"],
            result["state"],
            *(f"{result['metrics'][n]:.4g}" if n in result["metrics"] else "-" for n in names),
            result["results_dir"],
        )
        for result in results
    ]
    console.say("\n" + console.table(("values", "state", *names, "results"), rows))
    path = Path(config.base_results_dir) / SUMMARY_NAME
    write_json(path, {"at": record.now(), "combinations": results})
    console.say(f"comparison: {path}")
    return status


def _result(each: Run) -> dict[str, Any]:
    """Return what the records of a run say; its state is that of the last job that has one."""
    states = [found.state for found in each.records().values() if found is not None]
    results = each.results().values()
    return {
        "name": each.name,
        "results_dir": str(each.config.results_dir),
        "state": states[-1] if states else "finished earlier" if not each.jobs else "-",
        "exit_status": each.status,
        "metrics": {k: v for found in results for k, v in found.get("metrics", {}).items()},
    }
