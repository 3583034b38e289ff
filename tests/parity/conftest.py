"""The device of tests of kernels that Triton's interpreter can run, too."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Return a GPU, or the CPU with TRITON_INTERPRET=1, where Triton is installed; else skip."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no CUDA device is visible")
    return torch.device("cpu")
