"""A server that outlives the time limit of its jobs, on a real Slurm."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import openai
import pytest

from inference.server.client import TritonClient
from launcher_scripts.configuration.evaluation_config import Context
from launcher_scripts.launchers import slurm_chain
from launcher_scripts.launchers.base import Job
from launcher_scripts.launchers.slurm import SlurmLauncher
from launcher_scripts.launchers.slurm_chain import serve_in_chain
from launcher_scripts.stage_table import build_stage
from stages.deploy import DeployStage
from stages.endpoint import ServerEndpoint
from stages.progress import write_json
from tests.conftest import ROOT
from tests.integration.command import FREE_PORTS, finish, processes_of, start
from tests.integration.slurm_cluster import SlurmCluster
from tests.integration.slurm_runs import CLUSTER, configure
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.triton, pytest.mark.usefixtures("reachable")]
LONG = 50  # tokens of a stream
# A job of three minutes serves for 116 s: the signal before the limit may come a minute early.
REAL_LIMITS = ("deploy.time_limit=3", "deploy.handover_s=100")
# Both nodes are this machine; on two there is no memory to share.
NO_SHARED_MEMORY = {"shared_memory": "0"}
PAUSE_S = 0.5  # of a client, which leaves the processors to the next server


@pytest.fixture(autouse=True)
def no_job_goes_on(slurm_cluster: SlurmCluster) -> Iterator[None]:
    """Ends the chain of a test that has failed: it would run for days."""
    yield
    slurm_cluster.run("scancel", "--me")
    until(lambda: not slurm_cluster.run("squeue", "-h").strip(), "the end of every job")


class Uptime:
    """A chain of jobs that was submitted by the command."""

    def __init__(self, cluster: SlurmCluster, results: Path, repository: Path) -> None:
        self.cluster, self.results, self.repository = cluster, results, repository

    def run(self, *words: str) -> str:
        command = start(
            "export=gpt3/sample", "stages=[deploy]", *CLUSTER, *FREE_PORTS,
            f"base_results_dir={self.results}", f"deploy.repository={self.repository}",
            "deploy.uptime=7-00:00:00", "deploy.time_limit=10", "deploy.drain_s=3",
            "deploy.openai.enabled=true", "deploy.openai.port=0", "cluster.signal_delay_s=1",
            *words,
        )  # fmt: skip
        text = finish(command)
        assert command.returncode == 0, text
        return text

    @property
    def endpoint_path(self) -> Path:
        (found,) = self.results.glob("*/*/deploy")
        return found / "endpoint.json"

    def cancel(self) -> None:
        """End the chain with the command, and see that nothing of it is left."""
        command = start("action=cancel", f"base_results_dir={self.results}")
        text = finish(command)
        assert command.returncode == 0, text
        until(lambda: not self.queued(), "the end of every job")
        assert not self.endpoint_path.exists()
        until(lambda: not processes_of(self.results), "the end of every process")

    def serving(self) -> str:
        with contextlib.suppress(ValueError, FileNotFoundError):
            return str(json.loads(self.endpoint_path.read_text())["job_id"])
        return ""

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.endpoint_path.with_name("job.json").read_text())
        return found

    def state(self, job_id: str) -> str:
        return self.cluster.run("squeue", "-h", "-o", "%T", "-j", job_id, check=False).strip()

    def kill(self, job_id: str) -> None:
        """End every process of a job without warning, as soon as it has some."""
        until(lambda: self._killed(job_id) > 0, f"processes of job {job_id}")

    def _killed(self, job_id: str) -> int:
        count = 0
        wanted = {f"SLURM_CONF={self.cluster.folder}/slurm.conf", f"SLURM_JOB_ID={job_id}"}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                if wanted <= set(words):
                    os.kill(int(entry.name), signal.SIGKILL)
                    count += 1
        return count

    def successor(self) -> str:
        """Wait for the job that follows the one that serves."""
        until(
            lambda: self.record()["job_id"] == self.serving() and self.record()["successor"] != "",
            "the next job in the queue",
        )
        return str(self.record()["successor"])

    def queued(self) -> list[str]:
        return self.cluster.run("squeue", "-h", "-o", "%i").split()


def clients(endpoint_path: Path, over: threading.Event) -> list[Callable[[], list[Any]]]:
    """Return clients that read the address before each request, and return what they got."""

    def address(port: str) -> str:
        endpoint = json.loads(endpoint_path.read_text())
        return f"{endpoint['host']}:{endpoint[port]}"

    def stream() -> list[Any]:
        texts = []
        while not over.wait(PAUSE_S):
            with TritonClient(address("grpc"), timeout_s=240) as client:
                texts.append("".join(client.stream_text("It was", output_len=LONG)))
        return texts

    def stream_openai() -> list[Any]:
        texts = []
        while not over.wait(PAUSE_S):
            url = f"http://{address('openai')}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                chunks = list(
                    client.completions.create(
                        model="fastertransformer", prompt="It was", max_tokens=LONG, stream=True,
                        temperature=0,
                    )
                )  # fmt: skip
            assert chunks[-1].choices[0].finish_reason
            texts.append("".join(chunk.choices[0].text for chunk in chunks))
        return texts

    def ask() -> list[Any]:
        answers = []
        text = {"name": "QUERY", "datatype": "BYTES", "shape": [1, 1], "data": ["It was"]}
        count = {"name": "REQUEST_OUTPUT_LEN", "datatype": "UINT32", "shape": [1, 1], "data": [2]}
        while not over.wait(PAUSE_S):
            connection = http.client.HTTPConnection(address("http"), timeout=240)
            with contextlib.closing(connection):
                body = json.dumps({"inputs": [text, count]})
                connection.request("POST", "/v2/models/preprocessing/infer", body)
                answer = connection.getresponse()
                answers.append((answer.status, len(answer.read()) > 0))
        return answers

    return [stream, stream_openai, ask]


TWO_NODES = ("cluster.gpus_per_node=1", "cluster.mpi=none")


@pytest.mark.soak
@pytest.mark.parametrize(("nodes", "count"), [(1, 1), pytest.param(2, 1, marks=pytest.mark.long)])
def test_clients_notice_no_hand_over(
    tmp_path,
    slurm_cluster,
    sample_repository,
    soak,
    nodes,
    count,
):
    repository = sample_repository(tp_size=nodes, decoupled=True, parameters=NO_SHARED_MEMORY)
    chain = Uptime(slurm_cluster, tmp_path, repository)
    # The next job may start as soon as this one serves; with real limits, in the middle of it.
    limits = ("deploy.handover_s=535",) if soak == 1 else REAL_LIMITS
    chain.run(*limits, *(TWO_NODES if nodes == 2 else ()))
    until(lambda: chain.serving() != "", "the first server")
    over = threading.Event()
    served = [chain.serving()]
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(each) for each in clients(chain.endpoint_path, over)]
        try:
            for _ in range(count * min(soak, 6)):
                until(
                    lambda: (
                        any(each.done() for each in asking)
                        or chain.serving() not in ("", served[-1])
                    ),
                    "the next server",
                )
                served.append(chain.serving())
        finally:
            over.set()
        streamed, completed, asked = (each.result() for each in asking)
    assert len(set(served)) == len(served)
    assert len(streamed) > 3
    assert len(set(streamed)) == 1
    assert len(set(completed)) == 1
    assert set(asked) == {(200, True)}
    record = chain.endpoint_path.with_name("job.json")
    until(lambda: json.loads(record.read_text())["job_id"] == served[-1], "the claim of the chain")
    text = subprocess.run(
        [sys.executable, "main.py", "action=cancel", f"base_results_dir={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert text.returncode == 0, text.stdout
    until(lambda: not chain.queued(), "the end of every job")
    assert not chain.endpoint_path.exists()


def test_lost_jobs_are_replaced_and_a_cancelled_one_ends_the_chain(
    tmp_path, slurm_cluster, sample_repository
):
    chain = Uptime(slurm_cluster, tmp_path, sample_repository(tp_size=1))
    chain.run("deploy.handover_s=535", "deploy.restart_backoff_s=0.1")
    until(lambda: chain.serving() != "", "the first server")
    first = chain.serving()
    # The next job is lost while it loads: another one follows, and the first serves meanwhile.
    loading = str(int(first) + 1)
    until(lambda: chain.state(loading) == "RUNNING", "the start of the next job")
    chain.kill(loading)
    until(lambda: str(int(first) + 2) in chain.queued(), "the one instead")
    assert chain.serving() == first
    until(lambda: chain.serving() == str(int(first) + 2), "its turn")
    (log,) = chain.endpoint_path.parent.glob(f"log-*_{first}.err")
    assert f"the next job, {loading}, has ended before it served" in log.read_text()
    # The job that serves is lost: the next one starts.
    serving = chain.serving()
    following = chain.successor()
    chain.kill(serving)
    until(lambda: chain.serving() == following, "the next server")
    chain.successor()
    slurm_cluster.run("scancel", following)
    until(lambda: not chain.queued(), "the end of every job")
    assert not chain.endpoint_path.exists()


def test_successor_that_is_late_is_replaced_a_bounded_number_of_times(
    tmp_path,
    slurm_cluster,
    sample_repository,
    monkeypatch,
    capfd,
):
    """The job that serves is this process; those that should follow are real ones."""
    monkeypatch.setattr(slurm_chain, "_LATE_S", -1.0)  # from its first second on
    monkeypatch.setattr(slurm_chain, "_QUERY_S", 0.2)
    config = configure(
        f"base_results_dir={tmp_path}", f"deploy.repository={sample_repository(tp_size=1)}",
        "deploy.uptime=7-00:00:00", "deploy.time_limit=10", "deploy.handover_s=448",
        "deploy.max_restarts=1", "deploy.ready_timeout_s=1", "deploy.restart_backoff_s=0.1",
    )  # fmt: skip
    stage = build_stage("deploy", config, Context())
    assert isinstance(stage, DeployStage)
    stage.job.folder.mkdir(parents=True)
    job_id = slurm_cluster.run(
        "sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 60"
    ).strip()
    monkeypatch.setenv("SLIPWAY_JOB_ID", job_id)
    said: list[str] = []

    def has_failed() -> bool:
        said.append(capfd.readouterr().err)
        return "0 attempts" in "".join(said)

    def work() -> dict[str, Any]:
        mine = ServerEndpoint("here", 1, 2, 3, "gpt", None, job_id, 1, 1, "now")
        write_json(stage.readiness_path(), asdict(mine))
        until(has_failed)
        return {"ended": "no longer needed"}

    serve_in_chain(SlurmLauncher(config), Job(stage, config), work, threading.Event())
    assert "".join(said).count("has run for 0 s and does not serve") == 2
    slurm_cluster.run("scancel", job_id)
    until(lambda: not slurm_cluster.run("squeue", "-h").strip(), "the end of every job")
