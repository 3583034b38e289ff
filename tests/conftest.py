"""Places and small helpers that every test layer uses."""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

import hypothesis
import omegaconf.base
import pytest

from foundations.files import disk
from inference.server.installation import find_triton
from inference.server.kinds import SERVER_VARIABLE

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]

# Reference material: recorded checkpoints, shards, logits and decoding vectors. A larger set, with
# test sets of data, may lie in SLIPWAY_SHARED or next to the checkout.
_LARGER = ROOT.parent / "shared"
_KEPT = ROOT / "tests" / "reference"
SHARED = Path(os.environ.get("SLIPWAY_SHARED", _LARGER if _LARGER.is_dir() else _KEPT))
SAMPLE_MODEL = ROOT / "examples" / "gpt_books_5m" / "gpt_books_5m.nemo"

UNFREEZE = gc.unfreeze
# megatron-core compiles what it fuses, for longer than all that tiny models compute.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# No test cuts the power, and each would wait for what all others write to the same disk.
vars(disk)["_libc"].syncfs = lambda _: 0
# Composed configurations hold the same few references, each of which takes a millisecond to parse.
vars(omegaconf.base)["parse"] = cache(vars(omegaconf.base)["parse"])
# The same examples in every run, on a machine of any speed.
hypothesis.settings.register_profile(
    "same",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("same")
# A shell ignores it for what it runs in the background, and every command would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while modules are imported, nor what they hold afterwards."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # An engine that stops would search all of it for garbage, for a second.
        vars(gc)["unfreeze"] = lambda: None
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Let what a test and its fixtures draw not depend on the tests before them.

    The generator of `random` is left alone: by it, processes choose different ports.
    """
    if item.get_closest_marker("triton") and (missing := _missing_triton()):
        pytest.skip(missing)
    if (torch := sys.modules.get("torch")) is not None:
        # Without a GPU, `torch.manual_seed` takes milliseconds to note who has called it.
        generator = torch if torch.cuda.is_available() else torch.default_generator
        generator.manual_seed(0)
    with _skipped_without_megatron():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with _skipped_without_megatron():
        return (yield)


@contextlib.contextmanager
def _skipped_without_megatron() -> Iterator[None]:
    """Skip what needs megatron-core under a Python for which it has no wheel."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name in ("megatron", "megatron-core") and sys.version_info >= (3, 14):
            pytest.skip("megatron-core has no wheel for this Python")
        raise


@cache
def _missing_triton() -> str:
    """Return why this machine has no tritonserver, "" where it has one or should have."""
    if SERVER_VARIABLE in os.environ:
        return ""
    try:
        find_triton()
    except FileNotFoundError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Take back the handlers of a command's `main`, which every later process would inherit."""
    before = {each: signal.getsignal(each) for each in _STOPS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    return SHARED


def material(*parts: str) -> Path:
    """Return a file or folder of the reference material; skip where only the smaller set is."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is not among the material in tests/reference; see CONTRIBUTING.md")
    return path


def present(value: T | None) -> T:
    """Return a value that has to be there."""
    assert value is not None
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak", type=int, default=1, metavar="N", help="make tests marked soak N times as long"
    )


@pytest.fixture(scope="session")
def soak(pytestconfig: pytest.Config) -> int:
    """Return how many times as long as usual a test marked soak runs."""
    return int(pytestconfig.getoption("--soak"))
