"""`--multirun key=1,2,4`: a run for each combination of values."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

from hydra.core.override_parser.types import ValueType

from launcher_scripts.configuration.compose import Composition
from launcher_scripts.configuration.diagnosis import hydra_text, read_override


def combinations(overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the command line of each combination by name, and problems of sweeps without a list.

    A name is made of the values and the last part of each key: `data_type=fp16,size=2`.
    """
    swept = {}
    fixed, problems = [], []
    for override in overrides:
        try:
            parsed = read_override(override)
        except ValueError:
            fixed.append(override)  # composition reports the problem
            continue
        if not parsed.is_sweep_override():
            fixed.append(override)
        elif parsed.is_discrete_sweep() and parsed.value_type is not ValueType.GLOB_CHOICE_SWEEP:
            swept[parsed.get_key_element()] = list(dict.fromkeys(parsed.sweep_string_iterator()))
        else:
            problems.append(f"{override}: list the values, as in {parsed.key_or_group}=1,2,4.")
    found = {}
    for values in product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items())
        found[name] = [*fixed, *(f"{key}={value}" for key, value in chosen.items())]
    return found, problems


def compositions_of_sweep(
    overrides: Sequence[str], compose: Callable[[Sequence[str]], Composition]
) -> tuple[dict[str, Composition], list[str]]:
    """Return the configuration of each combination by name, and the problems of the sweep.

    Combinations that would share a results folder get one each.
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
        f"--multirun with action={action}: a sweep works only with action=run; leave one out."
        for action in {run.config.action for run in found.values() if run.config} - {"run"}
    ]
    return found, problems
