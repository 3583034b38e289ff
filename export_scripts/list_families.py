"""Command: python -m export_scripts.list_families --help."""

from __future__ import annotations

import sys

from export_scripts.commands import list_families_command

if __name__ == "__main__":
    sys.exit(list_families_command(sys.argv[1:]))
