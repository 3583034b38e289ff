"""Messages read from a server's log, and from the lines of NVIDIA's backend."""

from pathlib import Path
from typing import Any

import pytest

from inference.server.log import (
    fatal_lines,
    forwarded_log,
    last_lines,
    rotated_log,
    short_reason,
)
from tests.waiting import until

SIZES = "[WARNING] file /w/a.bin only has {}, but request {}, loading model fails! "


def test_last_lines_leave_out_tables_and_blank_lines(tmp_path):
    path = tmp_path / "log"
    path.write_text("one\n+-----+\n| a b |\n\ntwo\nthree\n")
    assert last_lines(path, 2) == ["two", "three"]
    assert last_lines(path, 9) == ["one", "two", "three"]
    assert last_lines(tmp_path / "none", 5) == []


def test_quotes_and_traces_of_a_reason_are_undone():
    assert short_reason('"no \\"x\\" here"') == 'no "x" here'
    trace = "Internal: ValueError: one\ntwo\n\nAt:\n  /x/model.py(3): initialize\n"
    assert short_reason(trace) == "Internal: ValueError: one\ntwo"


def test_long_lines_are_cut_and_import_frames_left_out(tmp_path):
    path = tmp_path / "log"
    path.write_text(f"  <frozen importlib._bootstrap>(1): _load\n{'x' * 999}\n")
    assert last_lines(path, 5) == ["x" * 300 + " ..."]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[WARNING] file /w/a.bin cannot be opened, loading model fails! ", "/w/a.bin cannot"),
        (SIZES.format(100, 400), "another tensor-parallel size"),
        ("[ERROR] Can't load '/w/config.ini'", "'/w/config.ini' (convert"),
        ("1. Number of visible GPUs must be evenly divisble by TP * PP", "CUDA_VISIBLE_DEVICES"),
        ("[ERROR] world_size (4) should equal to tensor_para_size_", "CUDA_VISIBLE_DEVICES"),
        ("CUDA out of memory", "CUDA out of memory"),
        ("[FT][ERROR] Unsupported Arch Assertion fail: a.cc:128 ", "Unsupported Arch"),
        ('server: a.cu:67: f(): Assertion `sm == 80 && "Unsupported"\' failed.', "Unsupported"),
        ("[FT][ERROR] NCCL error x.cc:7 'unhandled'", "NCCL error"),
    ],
)
def test_fatal_line_is_explained(line, reason):
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
def test_harmless_line_is_ignored(line):
    assert fatal_lines(line) == []


def test_log_that_is_put_aside_meanwhile_is_followed_further(tmp_path, monkeypatch, capfd):
    path, opened = tmp_path / "triton.log", Path.open
    path.write_text("first start\n")

    def put_aside_first(self: Path, *words: Any, **options: Any) -> Any:
        if self == path and not (tmp_path / "triton.1.log").exists():
            rotated_log(self)
        return opened(self, *words, **options)

    monkeypatch.setattr(Path, "open", put_aside_first)
    with forwarded_log(path):
        until((tmp_path / "triton.1.log").exists, "the next start")
        path.write_bytes(b"second start\n")
    assert capfd.readouterr().out == "second start\n"
