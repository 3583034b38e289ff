"""Constants of the command: folders, exit statuses and environment switches."""

import os
from pathlib import Path

# The checkout, or the folder of the installed package, which has the same layout.
CHECKOUT = Path(__file__).resolve().parents[2]
CONFIG_DIR = CHECKOUT / "conf"
IS_INSTALLED = not (CHECKOUT / "pyproject.toml").is_file()
PROGRAM = "slipway-serving" if IS_INSTALLED else "python main.py"

# A failed stage may have another exit status.
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

# Switches of the NeMo launcher: write scripts and start nothing; write one log file for each job.
DEBUG, CI = "NEMO_LAUNCHER_DEBUG", "NEMO_LAUNCHER_CI"
# Hydra's switch: show tracebacks.
FULL_ERROR = "HYDRA_FULL_ERROR"
_OFF = ("", "0", "false", "f", "no", "n", "off")


def is_set(variable: str) -> bool:
    """Return whether an environment switch is on: set to anything but a word for off."""
    return os.environ.get(variable, "").lower() not in _OFF
