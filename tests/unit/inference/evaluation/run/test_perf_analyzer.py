"""NVIDIA's load generator: what it is given and what is read from its export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inference.evaluation.options import EvaluationOptions, LatencyOptions, RequestShape
from inference.evaluation.run.latency import Load
from inference.evaluation.run.perf_analyzer import (
    PerfAnalyzer,
    exported_requests,
    read_requests,
    request_data,
)
from inference.evaluation.run.task_run import EvaluationError, RequestFailedError

LOAD = Load(((5, 6, 7), (8, 9, 10)), RequestShape(3, 4), batch_size=2, concurrency=2)
MS = 1_000_000


def request(start_ms: int, *ends_ms: int, lengths: list[int] | int) -> dict[str, object]:
    return {
        "timestamp": start_ms * MS,
        "response_timestamps": [end_ms * MS for end_ms in ends_ms],
        "response_outputs": [{"sequence_length": lengths} for _ in ends_ms],
    }


def export(*requests: dict[str, object]) -> str:
    return json.dumps({"experiments": [{"requests": requests}]})


def test_every_prompt_is_a_request():
    rows = request_data(LOAD)["data"]
    assert [row["input_ids"]["content"] for row in rows] == [[5, 6, 7], [8, 9, 10]]
    assert {tuple(row["request_output_len"]["content"]) for row in rows} == {(4,)}


def test_an_encoder_decoder_has_its_own_names():
    (row, _) = request_data(LOAD, is_encoder_decoder=True)["data"]
    assert (row["sequence_length"], row["max_output_len"]["content"]) == ([3], [4])


def test_times_and_tokens_leave_the_warm_up_out(tmp_path):
    (tmp_path / "profile").write_text(
        export(
            request(30, 55, lengths=[7, 6]),
            request(0, 90, lengths=[7, 7]),
            request(20, 40, lengths=[7, 7]),
        )
    )
    requests = exported_requests(tmp_path / "profile")
    found = read_requests(requests, warmup=1, prompt_len=3, streams=False)
    assert found.durations_s == pytest.approx([0.020, 0.025])
    assert found.generated == 4 + 4 + 4 + 3
    assert found.seconds == pytest.approx(0.035)
    assert found.arrivals_s == ()


def test_a_single_row_is_read():
    found = read_requests([request(0, 5, lengths=7)], warmup=0, prompt_len=3, streams=False)
    assert found.generated == 4


def test_every_response_of_a_stream_is_timed():
    answer = request(10, 30, 35, 45, lengths=7)
    found = read_requests([answer], warmup=0, prompt_len=3, streams=True)
    assert found.arrivals_s == [pytest.approx([0.020, 0.025, 0.035])]
    assert found.durations_s == pytest.approx([0.035])


@pytest.mark.parametrize("text", ["", '{"experiments":[{"requests":[{"timesta'])
def test_an_export_that_is_not_whole_has_no_requests(text, tmp_path):
    (tmp_path / "profile").write_text(text)
    assert exported_requests(tmp_path / "profile") == []


class Served:
    """A served decoder that answers at once."""

    is_encoder_decoder = False
    streams = False

    def complete_rows(self, rows, *, output_len):
        return [(9,) * output_len for _ in rows]


@pytest.fixture
def analyzer(tmp_path):
    def make(script: str, *, patience_s: float = 60.0) -> PerfAnalyzer:
        program = tmp_path / "perf_analyzer"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        options = EvaluationOptions(
            output_dir=Path("out"),
            data_dir=Path("data"),
            latency=LatencyOptions(requests=2, warmup=1),
        )
        return PerfAnalyzer(
            options, Served(), program=program, libraries=None, patience_s=patience_s
        )

    return make


def test_a_failed_run_shows_its_last_lines(analyzer):
    with pytest.raises(RequestFailedError, match=r"ended with status 3:\nno such model"):
        analyzer("echo no such model >&2; exit 3").send(LOAD)


def exporting(tmp_path: Path, *exports: str) -> str:
    """Return a program that writes one of the exports at each run, the last ever after."""
    for number, text in enumerate(exports):
        (tmp_path / f"export{number}").write_text(text)
    return f"""
        number=$(cat {tmp_path}/runs 2>/dev/null || echo 0)
        echo $((number + 1)) > {tmp_path}/runs
        [ $number -lt {len(exports)} ] || number={len(exports) - 1}
        while [ "$1" != --profile-export-file ]; do shift; done
        cp {tmp_path}/export$number "$2"
        echo measured well
    """


WHOLE = export(*(request(start, start + 5, lengths=[7, 7]) for start in (0, 10, 20)))


def test_an_empty_export_is_made_again(analyzer, tmp_path):
    found = analyzer(exporting(tmp_path, "", WHOLE[:70], WHOLE)).send(LOAD)
    assert found.durations_s == pytest.approx([0.005, 0.005])
    assert (tmp_path / "runs").read_text().strip() == "3"


def test_an_export_that_stays_short_is_reported_with_the_last_lines(analyzer, tmp_path):
    short = export(request(0, 5, lengths=[7, 7]))
    with pytest.raises(RequestFailedError, match=r"gave 1 of 3 requests .*\nmeasured well"):
        analyzer(exporting(tmp_path, short)).send(LOAD)


def test_a_run_without_end_is_stopped_and_made_again(analyzer, tmp_path):
    slept = tmp_path / "slept"
    once = f"[ -e {slept} ] || {{ touch {slept}; exec sleep 60; }}"
    found = analyzer(once + exporting(tmp_path, WHOLE), patience_s=3.0).send(LOAD)
    assert found.durations_s == pytest.approx([0.005, 0.005])


def test_runs_that_never_end_are_reported(analyzer):
    with pytest.raises(RequestFailedError, match=r"gave 0 of 3 .* did not end within 0 s"):
        analyzer("exec sleep 60", patience_s=0.1).send(LOAD)


def test_a_program_that_does_not_start_is_reported(analyzer):
    with pytest.raises(EvaluationError, match=r"missing libb64; set evaluate\.latency"):
        analyzer("echo missing libb64 >&2; exit 127").check()


def test_the_command_has_server_model_and_load(analyzer, tmp_path):
    with pytest.raises(RequestFailedError) as caught:
        analyzer('echo "$@"; exit 1').send(LOAD)
    reported = str(caught.value)
    for words in (
        "-m fastertransformer",
        "-u 127.0.0.1:8001 -i grpc",
        "-b 2 --concurrency-range 2",
        "--request-count 3",
    ):
        assert words in reported
