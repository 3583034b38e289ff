"""Checks of names, mounts, folders and variables that hold on every cluster."""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from foundations.values import shortened
from launcher_scripts.configuration.schema import Config

_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "CREDENTIAL")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Prefix of every job's name; some sites require account:project.
_PREFIX = re.compile(r"[\w.:@+-]{0,64}")
# SOURCE[:TARGET[:FLAGS]] as pyxis reads it, FLAGS such as ro+rprivate.
_MOUNT = re.compile(r"/[^:,]*(:/[^:,]*(:[\w=+-]+)?)?")

# Folders that stages make and fill.
_WRITTEN = (
    "base_results_dir",
    "export.run.results_dir",
    "export.triton_deployment.triton_model_dir",
    "evaluate.output_dir",
    "watch.output_dir",
    "upgrade.output_dir",
)


def problems_of_settings(config: Config) -> Iterator[str]:
    """Yield every problem that can be found without a model or a cluster."""
    prefix = config.cluster.job_name_prefix
    if not _PREFIX.fullmatch(prefix):
        yield (
            f"cluster.job_name_prefix={shortened(prefix)!r} is part of file names; use at most 64 "
            "letters, digits and . _ - : @ +."
        )
    for each in config.container_mounts:
        if each is not None and not (isinstance(each, str) and _MOUNT.fullmatch(each)):
            yield (
                f"container_mounts names {each!r}, which is not a mount; write /path, "
                "/path:/path/in/the/container, or with flags /path:/path/in/the/container:ro."
            )
    if config.run_dir is not None:
        yield (
            f"run_dir={config.run_dir} names an earlier run for action=status, logs or cancel, and "
            f"has no effect with action={config.action}; export.run.results_dir is this run's."
        )
    yield from _variables(config)
    yield from _places(config)


def nearest_that_exists(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.parents) if os.access(each, os.F_OK))


def _variables(config: Config) -> Iterator[str]:
    """Yield the problems of variables: names a shell cannot export, and secrets in clear text."""
    for name, value in config.env_vars.items():
        key = f"env_vars.{name}"
        if not _VARIABLE.fullmatch(str(name)):
            yield f"{key}: {name} is not a valid name of a variable; use letters, digits and _."
        if isinstance(value, (dict, list)):
            yield f"{key}={value}: expected a single value, not a list or a mapping."
        if value is not None and any(word in str(name).upper() for word in _SECRET_WORDS):
            yield (
                f"{key} holds a secret in clear text, which would be written to disk; export "
                f"{name} in the environment instead: jobs inherit it."
            )


def _places(config: Config) -> Iterator[str]:
    path = Path(config.launcher_scripts_path)
    if path.absolute().name != "launcher_scripts":
        yield (
            f"launcher_scripts_path={path} does not end in /launcher_scripts; give the folder of "
            "that name in your checkout."
        )
    tried: set[Path] = set()
    refused: list[Path] = []  # what lies below one of these has no problem of its own
    for key in _WRITTEN:
        if (path_text := config.at(key)) is None:
            continue
        there = nearest_that_exists(Path(path_text))
        if there in tried or any(there.is_relative_to(each) for each in refused):
            continue
        tried.add(there)
        objection = "" if there.is_dir() else "is not a folder"
        try:
            if not objection:
                tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            objection = f"cannot be written to ({error.strerror})"
        if objection:
            refused.append(there)
            yield f"{key}={path_text}: {there} {objection}; choose a folder of yours."
