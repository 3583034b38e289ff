"""NVIDIA's load generator: what it is given and what is read from its export."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.evaluation.latency import Load
from inference.evaluation.options import EvaluationOptions, LatencyOptions, Shape
from inference.evaluation.perf_analyzer import PerfAnalyzer, read_profile, request_data
from inference.evaluation.runner import EvaluationError, RequestFailedError

LOAD = Load(((5, 6, 7), (8, 9, 10)), Shape(3, 4), batch_size=2, concurrency=2)
MS = 1_000_000


def request(start_ms: int, end_ms: int, lengths: list[int] | int) -> dict[str, object]:
    return {
        "timestamp": start_ms * MS,
        "response_timestamps": [end_ms * MS],
        "response_outputs": [{"sequence_length": lengths}],
    }


def test_every_prompt_is_a_request():
    rows = request_data(LOAD)["data"]
    assert [row["input_ids"]["content"] for row in rows] == [[5, 6, 7], [8, 9, 10]]
    assert {tuple(row["request_output_len"]["content"]) for row in rows} == {(4,)}


def test_times_and_tokens_leave_the_warm_up_out():
    requests = [request(30, 55, [7, 6]), request(0, 90, [7, 7]), request(20, 40, [7, 7])]
    found = read_profile({"experiments": [{"requests": requests}]}, LOAD, warmup=1)
    assert found.durations_s == pytest.approx([0.020, 0.025])
    assert found.generated == 4 + 4 + 4 + 3
    assert found.seconds == pytest.approx(0.035)


def test_a_single_row_is_read():
    found = read_profile({"experiments": [{"requests": [request(0, 5, 7)]}]}, LOAD, warmup=0)
    assert found.generated == 4


@pytest.fixture
def analyzer(tmp_path):
    def make(script: str) -> PerfAnalyzer:
        program = tmp_path / "perf_analyzer"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        options = EvaluationOptions(
            output_dir=Path("out"), data_dir=Path("data"), latency=LatencyOptions(warmup=1)
        )
        return PerfAnalyzer(options, program=program, libraries=None)

    return make


def test_a_failed_run_shows_its_last_lines(analyzer):
    with pytest.raises(RequestFailedError, match=r"ended with status 3:\nno such model"):
        analyzer("echo no such model >&2; exit 3").send(LOAD)


def test_a_program_that_does_not_start_is_told(analyzer):
    with pytest.raises(EvaluationError, match=r"missing libb64; set evaluate\.latency"):
        analyzer("echo missing libb64 >&2; exit 127").check()


def test_the_command_has_server_model_and_load(analyzer, tmp_path):
    with pytest.raises(RequestFailedError) as caught:
        analyzer('echo "$@"; exit 1').send(LOAD)
    told = str(caught.value)
    for words in (
        "-m fastertransformer",
        "-u 127.0.0.1:8001 -i grpc",
        "-b 2 --concurrency-range 2",
        "--request-count 17",
    ):
        assert words in told
