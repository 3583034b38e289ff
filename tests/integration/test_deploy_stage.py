"""The server as a stage: restarts after a crash, the end on request, a repository in a store."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from inference.serving.client import TritonClient
from tests.integration.command import FREE_PORTS, endpoint_of, finish, served, start

pytestmark = pytest.mark.triton
RESULTS = Path("gpt_books_5m", "export_tp2_pp1_fp16_fp32")


def words(results: Path, *more: str) -> list[str]:
    return ["export=gpt3/sample", f"base_results_dir={results}", *FREE_PORTS, *more]


def one_process(results: Path, *texts: str) -> int:
    """Return the process whose command line holds all texts and which belongs to this run."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(results) in command and all(text in command for text in texts):
            return int(entry.name)
    raise AssertionError(f"no process with {texts}")


def answer(endpoint: dict[str, Any]) -> str:
    with TritonClient(f"127.0.0.1:{endpoint['grpc']}", timeout_s=60) as client:
        return client.generate_text(["It was"], output_len=4)[0][0]


def test_crashed_server_and_lost_rank_are_replaced_until_the_count_is_used_up(
    tmp_path: Path,
) -> None:
    path = tmp_path / RESULTS / "deploy" / "endpoint.json"
    command = start(
        *words(
            tmp_path,
            "stages=[deploy]",
            "deploy.max_restarts=2",
            "deploy.restart_backoff_s=0.2",
        )
    )
    try:
        first = endpoint_of(path, command)
        text = answer(first)
        os.kill(one_process(tmp_path, "bin/tritonserver", "--model-repository"), signal.SIGKILL)
        second = endpoint_of(path, command, restarts=1)
        assert (second["http"], second["grpc"]) == (first["http"], first["grpc"])
        assert answer(second) == text
        os.kill(one_process(tmp_path, "inference.serving.worker", "--settings"), signal.SIGKILL)
        third = endpoint_of(path, command, restarts=2)
        assert answer(third) == text
        os.kill(one_process(tmp_path, "bin/tritonserver", "--model-repository"), signal.SIGKILL)
        told = finish(command)
    finally:
        if command.poll() is None:
            command.send_signal(signal.SIGINT)
            finish(command)
    assert command.returncode == 1, told
    assert "the server failed again after 2 restarts: tritonserver ended with status" in told
    assert not path.exists()
    logs = list(path.parent.glob("tritonserver-*.log"))
    assert len(logs) == 3  # one for each start


def test_file_that_asks_for_the_end_ends_the_server_in_order(tmp_path: Path) -> None:
    folder = tmp_path / RESULTS / "deploy"
    command = start(*words(tmp_path, "stages=[deploy]", "deploy.keep=true"))
    endpoint_of(folder / "endpoint.json", command)
    (folder / "stop_requested").touch()
    text = finish(command)
    assert command.returncode == 0, text
    record = json.loads((folder / "job.json").read_text())
    assert record["summary"]["ended"] == "no longer needed"
    assert not (folder / "endpoint.json").exists()


@pytest.mark.s3
def test_repository_is_published_and_served_from_an_object_store(
    store_endpoint: str, tmp_path: Path
) -> None:
    boto3 = pytest.importorskip("boto3", reason="needs boto3: pip install 'slipway[s3]'")
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
    place = ("deploy.repository=s3://pipeline/sample", f"deploy.endpoint_url={store_endpoint}")
    command = words(tmp_path, "stages=[export,deploy]", *place)
    with served(tmp_path / RESULTS, *command, environment=environment) as endpoint:
        assert endpoint["ensemble"] == "ensemble"
        assert answer(endpoint).startswith("It was")
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket="pipeline")["Contents"]]
    assert "sample/fastertransformer/1/2-gpu/config.ini" in keys
    assert not [key for key in keys if key.endswith(("export.json", ".convert.json"))]
    for written in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert secret.encode() not in written.read_bytes(), written
    # Served from the store alone: the folder on disk is gone.
    (tmp_path / RESULTS / "model_repo").rename(tmp_path / "elsewhere")
    command = words(tmp_path, "stages=[deploy]", *place)
    with served(tmp_path / RESULTS, *command, environment=environment) as endpoint:
        assert answer(endpoint).startswith("It was")


@pytest.mark.s3
def test_store_that_cannot_be_reached_fails_the_export(tmp_path: Path) -> None:
    environment = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    started = time.monotonic()
    place = ("deploy.repository=s3://absent/x", "deploy.endpoint_url=http://127.0.0.1:1")
    command = start(*words(tmp_path, "stages=[export]", *place), environment=environment)
    text = finish(command)
    assert command.returncode == 1, text
    assert "s3://http://127.0.0.1:1/absent/x" in text
    assert time.monotonic() - started < 60
