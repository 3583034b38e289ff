"""The device of tests of kernels that Triton's interpreter can run, too."""

import os

import pytest
import torch


def skip_without_gpu(*, can_interpret: bool = False) -> None:
    """Skip a module of kernels where none can run, before its hundreds of variants are collected.

    With TRITON_INTERPRET=1, where Triton is installed, some can be interpreted.
    """
    interprets = can_interpret and os.environ.get("TRITON_INTERPRET") == "1"
    if not (interprets or torch.cuda.is_available()):
        pytest.skip("no CUDA device is visible", allow_module_level=True)


@pytest.fixture
def device() -> torch.device:
    """Return a GPU, or the CPU, for what can be interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
