"""Places and small helpers that every test layer uses."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Reference material (golden shards, recorded logits, data sets) kept next to the checkout.
SHARED = Path(os.environ.get("SLIPWAY_SHARED", ROOT.parent / "shared"))


# A shell ignores it for what it runs in the background, and every command would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of reference material, or skip where it is not at hand."""
    if not SHARED.is_dir():
        pytest.skip(f"reference material not found at {SHARED}; set SLIPWAY_SHARED to its folder")
    return SHARED


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak", type=int, default=1, metavar="N", help="make tests marked soak N times as long"
    )


@pytest.fixture(scope="session")
def soak(pytestconfig: pytest.Config) -> int:
    """Return how many times as long as usual a test marked soak goes on."""
    return int(pytestconfig.getoption("--soak"))
