"""Texts that tell tokenizers apart, whatever the tokenizer."""

import json
from pathlib import Path

PROBES: tuple[str, ...] = tuple(
    json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
)
