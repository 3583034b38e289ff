"""Tables in YAML that are part of the program; checkpoints' are read by `yaml_table`."""

from pathlib import Path
from typing import Any

import yaml


def read_own_table(path: Path) -> Any:
    """Return the content of a file, by PyYAML's parser in C where it has one: ten times as fast."""
    text = path.read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
