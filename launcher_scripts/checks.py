"""What is wrong with names, folders and variables, whatever the cluster."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterator
from pathlib import Path

from launcher_scripts.config import Config
from launcher_scripts.stage_table import STAGE_TABLE

_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "CREDENTIAL")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Names of jobs become names of files, and go into lines of scripts.
_NOT_IN_NAMES = re.compile(r"[/\x00-\x1f\x7f]")


def problems_of_settings(config: Config) -> list[str]:
    """Return every problem that needs neither a model nor a cluster to be seen."""
    return [*_names(config), *_variables(config), *_places(config)]


def nearest_that_exists(path: Path) -> Path:
    """Return `path`, or the lowest of the folders above it that can be seen from here."""
    return next(each for each in (path, *path.parents) if os.access(each, os.F_OK))


def _names(config: Config) -> Iterator[str]:
    """Refuse names of jobs that cannot be names of files."""
    keys = dict.fromkeys(f"{row.settings}.name" for row in STAGE_TABLE.values())
    names = {key: operator.attrgetter(key)(config) for key in keys}
    for key, name in names.items():
        if not name:
            yield f"{key} is empty; give the job a name."
    names["cluster.job_name_prefix"] = config.cluster.job_name_prefix
    for key, name in names.items():
        if _NOT_IN_NAMES.search(name):
            yield (
                f"{key}={name!r} is part of file names, where neither / nor line breaks can be; "
                "choose another name."
            )


def _variables(config: Config) -> Iterator[str]:
    """Refuse what a shell cannot export, and secrets: the configuration and scripts are saved."""
    for name, value in config.env_vars.items():
        key = f"env_vars.{name}"
        if not _VARIABLE.fullmatch(str(name)):
            yield f"{key}: {name} is not a name of a variable; use letters, digits and _."
        if isinstance(value, (dict, list)):
            yield f"{key}={value}: expected a single value, not a list or a mapping."
        if value is not None and any(word in str(name).upper() for word in _SECRET_WORDS):
            yield (
                f"{key} holds a secret in clear text, which would be written to disk; export "
                f"{name} in the environment instead: jobs inherit it."
            )


def _places(config: Config) -> Iterator[str]:
    """Refuse folders that nothing can be derived from, or written to."""
    path = Path(config.launcher_scripts_path)
    if path.name != "launcher_scripts":
        yield (
            f"launcher_scripts_path={path} does not end in /launcher_scripts; give the folder of "
            "that name in your checkout."
        )
    results = Path(config.base_results_dir)
    there = nearest_that_exists(results)
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield f"base_results_dir={results}: {there} cannot be written to; choose a folder of yours."
