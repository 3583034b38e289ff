"""Presence of the GPU kernels, all of which are written in Triton's language."""

from __future__ import annotations

from functools import cache


@cache
def has_gpu_kernels() -> bool:
    """Return whether Triton is installed; torch's builds for CPUs come without it."""
    try:
        import triton  # noqa: F401 - only whether it is there
    except ImportError:
        return False
    return True
