"""The server as a stage: restarts after a crash, the end on request, a repository in a store."""

import http.client
import json
import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inference.server.client import TritonClient
from inference.server.kinds import SLIPWAY, TRITONSERVER
from stages.base import StageError
from stages.deploy_config import DeployConfig
from stages.progress import Progress
from stages.service import Service
from tests.integration.command import (
    FREE_PORTS,
    endpoint_of,
    finish,
    processes_of,
    run,
    served,
    start,
)
from tests.integration.conftest import SampleRepository
from tests.waiting import until

# Words of the command lines of processes that are killed, one after the other.
VICTIMS = {
    SLIPWAY: (
        ("inference.host.__main__",),
        ("inference.ranks.worker", "--rank"),
    ),
    TRITONSERVER: (
        ("bin/tritonserver", "--model-repository"),
        ("python_backend_stub", "preprocessing"),
        ("inference.ranks.worker", "--rank"),
    ),
}
LONG = 80  # tokens of a stream that is under way for some time
TAKEOVER_S = 300.0  # limit on a slow machine, on which two servers compute at once
RESULTS = Path("gpt_books_5m", "export_tp2_pp1_fp16_fp32")


def words(results: Path, *more: str) -> list[str]:
    return ["export=gpt3/sample", f"base_results_dir={results}", *FREE_PORTS, *more]


@pytest.fixture(scope="module")
def exported(sample_repository: SampleRepository, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of results with the sample model's repository."""
    results = tmp_path_factory.mktemp("results")
    shutil.copytree(sample_repository(tp_size=2), results / "repository")
    return results


def deploy_words(results: Path, *more: str) -> list[str]:
    return words(results, "stages=[deploy]", f"deploy.repository={results}/repository", *more)


def one_process(results: Path, *texts: str) -> int:
    """Return the process of this run whose command line holds all texts."""
    found = processes_of(results)
    return next(pid for pid, line in found.items() if all(text in line for text in texts))


def answer(endpoint: dict[str, Any]) -> str:
    with TritonClient(f"127.0.0.1:{endpoint['grpc']}", timeout_s=240) as client:
        return client.generate_text(["It was"], output_len=4)[0][0]


def test_crashed_server_is_replaced_until_the_count_is_used_up(usual_host, exported):
    path = exported / RESULTS / "deploy" / "endpoint.json"
    *first_victims, last_victim = VICTIMS[usual_host]
    restarts = (f"deploy.max_restarts={len(first_victims)}", "deploy.restart_backoff_s=0.2")
    for log in path.parent.glob("server-*.log"):
        log.unlink()
    command = start(*deploy_words(exported, *restarts, f"deploy.server={usual_host}"))
    try:
        first = endpoint_of(path, command)
        text = answer(first)
        for count, victim in enumerate(first_victims, 1):
            os.kill(one_process(exported, *victim), signal.SIGKILL)
            following = endpoint_of(path, command, restarts=count)
            assert (following["http"], following["grpc"]) == (first["http"], first["grpc"])
            assert answer(following) == text
        os.kill(one_process(exported, *last_victim), signal.SIGKILL)
        reported = finish(command)
    finally:
        if command.poll() is None:
            command.send_signal(signal.SIGINT)
            finish(command)
    assert command.returncode == 1, reported
    assert re.search(rf"the server failed again after {len(first_victims)} restarts?: ", reported)
    assert "rank 1: was ended by SIGKILL" in reported
    assert not path.exists()
    logs = list(path.parent.glob(f"server-{first['job_id']}*.log"))
    assert len(logs) == len(VICTIMS[usual_host])  # one for each start


def test_new_server_takes_over_without_being_missed_and_ends_with_ctrl_c(
    usual_host, sample_repository, tmp_path
):
    path = tmp_path / RESULTS / "deploy" / "endpoint.json"
    streamed: list[str] = []
    outlived: list[int] = []  # frames that came after the new server was published
    kept: list[int] = []  # statuses of requests over connections that stay open
    over = threading.Event()

    def stream_all_the_while() -> None:
        while not over.is_set():
            endpoint = json.loads(path.read_text())
            pieces = []
            with TritonClient(f"127.0.0.1:{endpoint['grpc']}", timeout_s=240) as client:
                for piece in client.stream_text("It was", output_len=LONG):
                    pieces.append(piece)
                    if json.loads(path.read_text())["ready_at"] != endpoint["ready_at"]:
                        outlived.append(len(pieces))
            streamed.append("".join(pieces))

    def ask_over_one_connection(port: int, target: str, body: dict[str, Any]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
        connection.connect()
        own = connection.sock
        while not over.wait(0.2):  # which leaves the processors to the new server
            headers = {"Content-Type": "application/json"}
            connection.request("POST", target, json.dumps(body), headers)
            answer = connection.getresponse()
            answer.read()
            kept.append(answer.status)
            assert connection.sock is own, "the connection was closed"

    def servers() -> list[int]:
        wanted = ("bin/tritonserver", "--model-repository")
        found = processes_of(tmp_path).items()
        return [
            pid
            for pid, line in found
            if all(word in line for word in wanted) and "server.supervisor" not in line
        ]

    def has_changed() -> bool:
        """Return whether the former tritonserver has ended; our own loads in its process."""
        now = json.loads(path.read_text())["ready_at"] != first["ready_at"]
        return now if usual_host == SLIPWAY else not set(old) & set(servers())

    shutil.copytree(sample_repository(tp_size=1, decoupled=True), tmp_path / "repository")
    openai = ("deploy.openai.enabled=true", "deploy.openai.port=0")
    command = start(*deploy_words(tmp_path, *openai, f"deploy.server={usual_host}"))
    try:
        first = endpoint_of(path, command)
        facts = [first[name] for name in ("host", "tp", "model", "ensemble")]
        assert facts == ["127.0.0.1", 1, "fastertransformer", "ensemble"]
        old = servers()
        text = {"name": "QUERY", "datatype": "BYTES", "shape": [1, 1], "data": ["It was"]}
        count = {"name": "REQUEST_OUTPUT_LEN", "datatype": "UINT32", "shape": [1, 1], "data": [2]}
        infer = ("/v2/models/preprocessing/infer", {"inputs": [text, count]})
        prompt = {"model": "fastertransformer", "prompt": "It was", "max_tokens": 2}
        with ThreadPoolExecutor(3) as pool:
            asking = [pool.submit(stream_all_the_while)]
            asking.append(pool.submit(ask_over_one_connection, first["http"], *infer))
            asking.append(
                pool.submit(ask_over_one_connection, first["openai"], "/v1/completions", prompt)
            )

            def ended() -> bool:
                return any(each.done() for each in asking)

            try:
                until(lambda: ended() or len(streamed) > 1, "the first answers", limit_s=TAKEOVER_S)
                (path.parent / "reload_requested").touch()
                until(lambda: ended() or has_changed(), "the old one's end", limit_s=TAKEOVER_S)
                count_now = len(streamed)
                until(lambda: ended() or len(streamed) > count_now + 1, "answers of the new one")
            finally:
                over.set()
            for each in asking:
                each.result()
        second = json.loads(path.read_text())
    finally:
        command.send_signal(signal.SIGINT)
        printed = finish(command)
    assert command.returncode == 0, printed
    ports = ("http", "grpc", "metrics", "openai")
    assert [first[name] for name in ports] == [second[name] for name in ports]
    assert second["ready_at"] != first["ready_at"]
    assert set(kept) == {200}
    assert len(set(streamed)) == 1  # whole: all streams give the same text
    assert outlived, "no stream was under way when the new server took over"
    assert not path.exists()
    assert not processes_of(tmp_path)


@pytest.mark.parametrize("by", ["file", pytest.param("signal", marks=pytest.mark.long)])
def test_server_that_is_still_loading_ends_when_it_is_asked_to(usual_host, exported, by):
    folder = exported / RESULTS / "deploy"
    progress = folder / "progress.json"
    progress.unlink(missing_ok=True)
    command = start(*deploy_words(exported, f"deploy.server={usual_host}"))

    def is_loading() -> bool:
        assert command.poll() is None, command.stdout.read() if command.stdout else ""
        return progress.exists() and "loading " in progress.read_text()

    try:
        until(is_loading, "loading")
        if by == "file":
            (folder / "stop_requested").touch()
        else:
            command.send_signal(signal.SIGINT)
    except BaseException:
        command.send_signal(signal.SIGINT)  # the tests that follow use the same folder
        raise
    finally:
        text = finish(command)
    record = json.loads((folder / "job.json").read_text())
    if by == "file":
        assert command.returncode == 0, text
        assert record["summary"]["ended"] == "no longer needed"
    else:
        assert record["state"] == "cancelled", text
    # It has never been ready.
    log = (folder / f"server-{record['job_id']}.log").read_text()
    assert "successfully loaded 'ensemble'" not in log
    assert not (folder / "endpoint.json").exists()


def test_time_that_is_over_before_the_server_is_ready_is_a_failure(exported, tmp_path):
    config = DeployConfig(
        folder=exported / "repository",
        model_name="fastertransformer",
        tp_size=2,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
    )
    service = Service(
        config,
        tmp_path,
        Progress(),
        until=time.monotonic(),
    )
    with pytest.raises(StageError, match=r"over before the server was ready; raise deploy\.time"):
        service.run()
    assert not (tmp_path / "endpoint.json").exists()


@pytest.mark.triton
@pytest.mark.s3
def test_repository_is_published_and_served_from_an_object_store(
    store_endpoint, tmp_path, monkeypatch
):
    boto3 = pytest.importorskip("boto3", reason="needs boto3: pip install boto3")
    secret = "only-for-this-test"
    environment = {
        "AWS_ACCESS_KEY_ID": secret,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    client = boto3.client(
        "s3",
        endpoint_url=store_endpoint,
        aws_access_key_id=secret,
        aws_secret_access_key=secret,
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="pipeline")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # Into an empty place: published first, then served from there.
    command = words(tmp_path, "export.model.tensor_model_parallel_size=1")
    command.append(f"deploy.repository=s3://{store_endpoint}/pipeline/sample")
    results = tmp_path / "gpt_books_5m" / "export_tp1_pp1_fp16_fp32"
    with served(results, *command, "stages=[deploy]") as endpoint:
        assert endpoint["ensemble"] == "ensemble"
        assert answer(endpoint).startswith("It was")
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket="pipeline")["Contents"]]
    assert "sample/fastertransformer/1/1-gpu/config.ini" in keys
    assert not [key for key in keys if key.endswith(("export.json", ".convert.json"))]
    for written in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert secret.encode() not in written.read_bytes(), written


@pytest.mark.triton
@pytest.mark.s3
def test_store_that_cannot_be_reached_fails_the_export(tmp_path, monkeypatch):
    environment = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    started = time.monotonic()
    place = "deploy.repository=s3://http://127.0.0.1:1/absent/x"
    status, text = run(*words(tmp_path, "stages=[export]", place))
    assert status == 1, text
    assert "s3://http://127.0.0.1:1/absent/x" in text
    assert time.monotonic() - started < 60
