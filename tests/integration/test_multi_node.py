"""A model over the two nodes of a real Slurm: same tokens as on one, and what a loss leads to."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.server.client import TritonClient
from launcher_scripts.main import main
from tests.integration.command import FREE_PORTS, ROOT
from tests.integration.slurm_cluster import SlurmCluster
from tests.integration.slurm_runs import CLUSTER
from tests.waiting import kill_all, until

pytestmark = [pytest.mark.slurm, pytest.mark.triton]
SAMPLE = ("export=gpt3/sample", "export.triton_deployment.pipeline_model_parallel_size=2")
LONG = 150  # tokens that take seconds on two nodes of one machine
SAMPLE_FOLDER = Path("gpt_books_5m", "export_tp2_pp2_fp16_fp32", "deploy")
# Both nodes are this machine; on two there is no memory to share.
NO_SHARED_MEMORY = "+export.triton_deployment.parameters.shared_memory=0"
WORDS = (
    NO_SHARED_MEMORY,
    *CLUSTER,
    "cluster.mpi=none",
    "cluster.gpus_per_node=2",
    *FREE_PORTS,
    "deploy.restart_backoff_s=0.2",
    "deploy.time_limit=30",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def nvidia_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return another, whose repository is for NVIDIA's backend."""
    return exported(tmp_path_factory.mktemp("nvidia"), "deploy.engine=fastertransformer")


def exported(results: Path, *words: str) -> Path:
    words = (*SAMPLE, NO_SHARED_MEMORY, *words, f"base_results_dir={results}")
    assert main([*words, "stages=[convert,export]"]) == 0
    return results


class Service:
    """A server on the cluster, after other stages if `model` asks for them."""

    def __init__(
        self,
        cluster: SlurmCluster,
        results: Path,
        *words: str,
        model: Sequence[str] = (*SAMPLE, "stages=[deploy]"),
        folder: Path = SAMPLE_FOLDER,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster = cluster
        self.folder = results / folder
        (self.folder / "job.json").unlink(missing_ok=True)  # that of an earlier test
        command = [sys.executable, "main.py", f"base_results_dir={results}", *model]
        command += [*WORDS, *words]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**cluster.environment, "OMP_NUM_THREADS": "1", **(environment or {})},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def endpoint(self, *, restarts: int = 0, timeout_s: float = 180) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        path = self.folder / "endpoint.json"
        while True:
            if path.exists():
                found: dict[str, Any] = json.loads(path.read_text())
                if found["restarts"] >= restarts:
                    return found
            assert self.record().get("state") not in ("failed", "cancelled"), self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def record(self) -> dict[str, Any]:
        path = self.folder / "job.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def wait_until_gone(self) -> None:
        until(lambda: not self.cluster.run("squeue", "-h", check=False).strip(), "the job's end")

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*"))
            if path.suffix in (".out", ".err", ".log")
        )

    def ranks(self, node: str) -> list[int]:
        """Return the processes of ranks other than 0 on a node."""
        return self._processes(node, b"inference.ranks.launched_rank")

    def tasks(self, node: str) -> list[int]:
        """Return the processes on a node that take part in the job."""
        return self._processes(node, b"stages.step")

    def _processes(self, node: str, text: bytes) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_bytes()
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if text in command and (
                f"SLURMD_NODENAME={node}".encode() in variables
                and f"SLURM_CONF={self.cluster.environment['SLURM_CONF']}".encode() in variables
            ):
                found.append(int(entry.name))
        return found


def tokens(endpoint: dict[str, Any], prompt: list[int], count: int) -> list[int]:
    with TritonClient(f"{endpoint['host']}:{endpoint['grpc']}", timeout_s=240) as client:
        outputs = client.infer(
            endpoint["model"],
            {
                "input_ids": np.array([prompt], np.uint32),
                "input_lengths": np.array([[len(prompt)]], np.uint32),
                "request_output_len": np.array([[count]], np.uint32),
            },
        )
    answer: list[int] = outputs["output_ids"][0, 0].tolist()
    return answer


def running_sequences(endpoint: dict[str, Any]) -> int:
    """Return how many sequences the model generates at this moment."""
    url = f"http://{endpoint['host']}:{endpoint['metrics']}/metrics"
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    return sum(
        int(float(line.rpartition(" ")[2]))
        for line in text.splitlines()
        if line.startswith("slipway_running_sequences{")
    )


def test_two_nodes_give_the_recorded_tokens_and_replace_a_lost_rank(
    slurm_cluster, results, greedy_cases
):
    service = Service(slurm_cluster, results, "deploy.max_restarts=1", "deploy.drain_s=240")
    endpoint = service.endpoint()
    assert (endpoint["tp"], endpoint["pp"], endpoint["nodes"]) == (2, 2, 2)
    # The nodes of the test have no names of their own to look up: theirs is this machine's.
    assert endpoint["host"] == socket.gethostname()
    assert service.record()["host"] == "n1"
    assert (len(service.ranks("n1")), len(service.ranks("n2"))) == (1, 2)
    cases = [(each["input_ids"], each["greedy_output_ids"]) for each in greedy_cases[:2]]
    for prompt, expected in cases:
        assert tokens(endpoint, prompt, len(expected) - len(prompt)) == expected
    os.kill(service.ranks("n2")[0], signal.SIGKILL)
    again = service.endpoint(restarts=1)
    prompt, expected = cases[0]
    assert tokens(again, prompt, 4) == expected[: len(prompt) + 4]
    # The end waits for running requests.
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(tokens, again, [257, 313], LONG) for _ in range(2)]
        until(lambda: running_sequences(again) == 2, "the running requests")
        (service.folder / "stop_requested").touch()
        assert [len(each.result()) for each in running] == [2 + LONG] * 2
    service.wait_until_gone()
    assert service.record()["summary"]["ended"] == "no longer needed", service.logs()
    assert not (service.folder / "endpoint.json").exists()


@pytest.mark.long
def test_an_encoder_over_two_nodes_gives_the_recorded_states_and_a_lost_node_ends_it(
    slurm_cluster, shared, tmp_path
):
    golden = shared / "golden" / "bert" / "tiny"
    model = (
        "export=gpt3/export_gpt3",
        "export.run.model_train_name=tiny",
        "export.run.model_type=bert",
        f"export.model.checkpoint_path={golden / 'source'}",
        "export.model.tensor_model_parallel_size=2",
        "export.model.weight_data_type=fp32",
        "export.model.processes=1",
        "export.triton_deployment.data_type=fp32",
        "+export.triton_deployment.parameters.device=cpu",
    )
    folder = Path("tiny", "export_tp2_pp1_fp32_fp32", "deploy")

    def started(*stages: str) -> tuple[Service, dict[str, Any]]:
        words = (*model, f"stages=[{','.join(stages)}]")
        service = Service(
            slurm_cluster, tmp_path, "cluster.gpus_per_node=1", model=words, folder=folder
        )
        return service, service.endpoint()

    service, endpoint = started("convert", "export", "deploy")
    assert (endpoint["tp"], endpoint["nodes"]) == (2, 2)
    states = np.load(golden / "input_hidden_state.npy").astype(np.float32)[None]
    request = {
        "input_hidden_state": states,
        "sequence_lengths": np.array([[states.shape[1]]], np.int32),
    }
    with TritonClient(f"{endpoint['host']}:{endpoint['grpc']}", timeout_s=240) as client:
        hidden = client.infer(endpoint["model"], request)["output_hidden_state"]
    # fp32 on both sides; what remains is the order of sums.
    np.testing.assert_allclose(hidden[0], np.load(golden / "output_hidden_state.npy"), atol=1e-3)
    # With a node go also the processes that would start a rank again.
    kill_all(service.ranks("n2") + service.tasks("n2"))
    service.wait_until_gone()
    record = service.record()
    assert record["state"] == "failed", service.logs()
    assert "rank 1" in record["error"], service.logs()
    assert not (service.folder / "endpoint.json").exists()
    service, _ = started("deploy")
    assert service.ranks("n2")
    # The job's first process, which owns the server and its supervisor.
    kill_all(service.tasks("n1"))
    service.wait_until_gone()
    until(lambda: not service.ranks("n1") + service.ranks("n2"), "the end of all ranks")


def stand_in(tmp_path: Path) -> dict[str, str]:
    """Return variables with which `tritonserver` stands in for that with NVIDIA's backend."""
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    script = Path(__file__).with_name("fake_fastertransformer.py")
    command = shlex.join([sys.executable, str(script)])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
    return {
        "TRITON_SERVER": str(program),  # next to a developer's own
        "PATH": f"{program.parent}:{os.environ['PATH']}:/usr/sbin",
        "FAKE_SERVER_TOLD": str(tmp_path / "reported"),
    }


def test_engine_of_nvidia_runs_one_server_per_node(slurm_cluster, nvidia_results, tmp_path):
    service = Service(
        slurm_cluster,
        nvidia_results,
        "deploy.engine=fastertransformer",
        environment=stand_in(tmp_path),
    )
    endpoint = service.endpoint()
    assert endpoint["nodes"] == 2
    further = tmp_path / "reported-further"
    until(further.exists, "the second node's server")
    assert json.loads(further.read_text())["allow-http"] == "false"
    (service.folder / "stop_requested").touch()
    service.wait_until_gone()
    assert service.record()["state"] == "completed", service.logs()


def test_weights_that_another_node_lacks_fail_the_service(slurm_cluster, nvidia_results, tmp_path):
    line = "[FT][WARNING] file /w/model.wte.bin cannot be opened, loading model fails! "
    environment = {**stand_in(tmp_path), "FAKE_FURTHER_SERVER_SAYS": line}
    words = ("deploy.engine=fastertransformer",)
    service = Service(slurm_cluster, nvidia_results, *words, environment=environment)
    service.wait_until_gone()
    assert service.record()["state"] == "failed", service.logs()
    assert "file /w/model.wte.bin cannot be opened" in service.record()["error"]
