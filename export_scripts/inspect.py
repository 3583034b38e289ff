"""Command: python -m export_scripts.inspect --help."""

from __future__ import annotations

import sys

from export_scripts.commands import inspect_command

if __name__ == "__main__":
    sys.exit(inspect_command(sys.argv[1:]))
