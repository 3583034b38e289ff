"""YAML tables of this program; those of checkpoints are read by `yaml_table`."""

from pathlib import Path
from typing import Any

import yaml


def read_table(path: Path) -> Any:
    """Return the content of a file; PyYAML's C parser, where installed, is ten times as fast."""
    text = path.read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
