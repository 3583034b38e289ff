"""Checks of folders and environment variables, the same on every cluster."""

import logging
import os
import re
from collections.abc import Iterator

from foundations.files.disk import folder_problem
from launcher_scripts.configuration.schema import Config
from stages.job import LOG_LEVEL_VARIABLE
from stages.job_process import JOB_ID_VARIABLE, MARK_VARIABLE, OWNER_VARIABLE

_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "CREDENTIAL")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Folders that stages create and write to.
_WRITTEN_FOLDERS = (
    "base_results_dir",
    "export.run.results_dir",
    "evaluate.output_dir",
    "watch.output_dir",
    "upgrade.output_dir",
)


def problems_of_settings(config: Config) -> Iterator[str]:
    """Yield every problem that can be found without a model or a cluster."""
    level = os.environ.get(LOG_LEVEL_VARIABLE, "INFO")
    if level.upper() not in logging.getLevelNamesMapping():
        yield f"{LOG_LEVEL_VARIABLE}={level} is not a log level; use DEBUG, INFO or WARNING."
    yield from _variable_problems(config)
    yield from _folder_problems(config)


def _variable_problems(config: Config) -> Iterator[str]:
    """Yield the problems of `env_vars`, such as names a shell cannot export, or secrets."""
    for name, value in config.env_vars.items():
        key = f"env_vars.{name}"
        if not _VARIABLE.fullmatch(str(name)):
            yield f"{key}: {name} is not a valid variable name; use letters, digits and _."
        if name in (JOB_ID_VARIABLE, MARK_VARIABLE, OWNER_VARIABLE):
            yield f"{key} identifies each job and is set by the launcher; leave it out."
        if isinstance(value, (dict, list)):
            yield f"{key}={value}: expected a single value, not a list or a mapping."
        if value is not None and any(word in str(name).upper() for word in _SECRET_WORDS):
            yield (
                f"{key} holds a secret in clear text, which would be written to disk; export "
                f"{name} in the environment instead: jobs inherit it."
            )


def _folder_problems(config: Config) -> Iterator[str]:
    named = set()  # several keys may name one folder, or folders below it
    for key in _WRITTEN_FOLDERS:
        folder = config.at(key)
        problem = None if folder is None else folder_problem(folder)
        if problem and problem not in named:
            named.add(problem)
            yield f"{key}={folder}: {problem}; choose a folder of yours."
