"""The environment variables by which users of the NeMo launcher switch its debugging aids on."""

from __future__ import annotations

import os

from launcher_scripts.config import Config

# Write scripts and start nothing.
DEBUG = "NEMO_LAUNCHER_DEBUG"
# Put all output of a job into one file.
CI = "NEMO_LAUNCHER_CI"
# Write down the use of GPU memory while a job runs; on Slurm.
MEMORY_MEASURE = "NEMO_LAUNCHER_MEMORY_MEASURE"
# Hydra's own: show tracebacks.
FULL_ERROR = "HYDRA_FULL_ERROR"
_TRUTHY = ("true", "t", "1")


def only_writes(config: Config) -> bool:
    """Whether scripts are written and nothing is started."""
    return config.dry_run or is_set(DEBUG)


def is_set(variable: str) -> bool:
    """Whether a switch is on."""
    return os.environ.get(variable, "").lower() in _TRUTHY
