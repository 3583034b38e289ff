"""Texts for which different tokenizers give different IDs."""

import json
from pathlib import Path

PROBES: tuple[str, ...] = tuple(
    json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
)
