"""Constants of the command: its folder, exit statuses and environment switches."""

import os
from pathlib import Path

# A checkout, or the folder of the installed package, which is laid out alike.
CHECKOUT = Path(__file__).resolve().parents[2]
CONFIG_DIR = CHECKOUT / "conf"
IS_INSTALLED = not (CHECKOUT / "pyproject.toml").is_file()
PROGRAM = "slipway-serving" if IS_INSTALLED else "python main.py"

# A stage that ran and failed may have an exit status of its own.
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

# Switches of the NeMo launcher. Write scripts and start nothing:
DEBUG = "NEMO_LAUNCHER_DEBUG"
# Put all output of a job into one file.
CI = "NEMO_LAUNCHER_CI"
# Hydra's own: show tracebacks.
FULL_ERROR = "HYDRA_FULL_ERROR"
_OFF = ("", "0", "false", "f", "no", "n", "off")


def is_set(variable: str) -> bool:
    """Return whether a switch is on; any word but those for off switches it on."""
    return os.environ.get(variable, "").lower() not in _OFF
