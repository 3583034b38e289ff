"""The GPUs that a process may use, without initialising CUDA, which would freeze what it sees."""

from __future__ import annotations

import os
from pathlib import Path

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """Return the names of the visible GPUs, as CUDA_VISIBLE_DEVICES spells them."""
    if (text := os.environ.get(VISIBLE_VARIABLE)) is not None:
        return [name.strip() for name in text.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
