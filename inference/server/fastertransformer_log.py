"""What NVIDIA's C++ backend says when a model is not usable, in words that say what to do.

The backend goes on with uninitialised weights after some of these lines and reports ready.
"""

from __future__ import annotations

import re

_MISSING = re.compile(r"file (?P<path>\S+) cannot be opened, loading model fails!")
_SHORT = re.compile(
    r"file (?P<path>\S+) only has (?P<has>\d+), but request (?P<wants>\d+), loading model fails!"
)
_NO_CONFIG = re.compile(r"Can't load '(?P<path>[^']*config\.ini)'")
_RANKS = re.compile(r"world_size \(\d+\) should equal to|Number of visible GPUs must be evenly")
_OTHERS = re.compile(
    r"Assertion (?:fail|`.*failed)|CUDA out of memory|NCCL[^\n]*\berror\b|MPI_ABORT"
    r"|Multi-Node Inference only"
)
_MOST = 300  # characters of a line worth showing


def fatal_lines(text: str) -> list[str]:
    """Return why the model is not usable, one message for each telling line of a log."""
    return [message for line in text.splitlines() if (message := _explained(line))]


def _explained(line: str) -> str | None:
    if missing := _MISSING.search(line):
        return f"weight file {missing['path']} is missing; convert the model again"
    if short := _SHORT.search(line):
        has, wants = int(short["has"]), int(short["wants"])
        return (
            f"weight file {short['path']} has {has} bytes of {wants} that the backend expects; "
            f"{_reason(has, wants)}"
        )
    if config := _NO_CONFIG.search(line):
        return f"{config['path']} cannot be read; convert the model again"
    told = line.strip()[:_MOST]
    if _RANKS.search(line):
        return f"{told} (show the server exactly TP x PP GPUs with CUDA_VISIBLE_DEVICES)"
    return told if _OTHERS.search(line) else None


def _reason(has: int, wants: int) -> str:
    """Return what a wrong size points to."""
    if has == 2 * wants or wants == 2 * has:
        return "its type and weight_data_type of config.ini differ"
    if has and (wants % has == 0 or has % wants == 0):
        return "it was written for another tensor-parallel size"
    return "it is not complete; convert the model again"
