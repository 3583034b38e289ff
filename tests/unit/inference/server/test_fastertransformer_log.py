"""Messages read from the log of NVIDIA's backend."""

from __future__ import annotations

import pytest

from inference.server.server_log import fatal_lines

SIZES = "[WARNING] file /w/a.bin only has {}, but request {}, loading model fails! "


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[WARNING] file /w/a.bin cannot be opened, loading model fails! ", "/w/a.bin is missing"),
        (SIZES.format(100, 200), "weight_data_type of config.ini differ"),
        (SIZES.format(100, 400), "another tensor-parallel size"),
        (SIZES.format(100, 170), "not complete"),
        ("[ERROR] Can't load '/w/config.ini'", "/w/config.ini cannot be read"),
        ("1. Number of visible GPUs must be evenly divisble by TP * PP", "CUDA_VISIBLE_DEVICES"),
        ("[ERROR] world_size (4) should equal to tensor_para_size_", "CUDA_VISIBLE_DEVICES"),
        ("CUDA out of memory", "CUDA out of memory"),
        ("[FT][ERROR] Unsupported Arch Assertion fail: a.cc:128 ", "Unsupported Arch"),
        ('server: a.cu:67: f(): Assertion `sm == 80 && "Unsupported"\' failed.', "Unsupported"),
        ("[FT][ERROR] NCCL error x.cc:7 'unhandled'", "NCCL error"),
    ],
)
def test_fatal_line_is_explained(line: str, reason: str) -> None:
    (message,) = fatal_lines(f"before\n{line}\nafter\n")
    assert reason in message


@pytest.mark.parametrize(
    "line",
    [
        "[WARNING] gemm_config.in is not found; using default GEMM algo",
        "Custom All Reduce only supports 8 Ranks currently. Using NCCL as Comm.",
        "shape is zero, skip loading weight from file /w/a.bin",
    ],
)
def test_harmless_line_is_ignored(line: str) -> None:
    assert fatal_lines(line) == []
