"""The pods of a LeaderWorkerSet, run as its manifest has them: one shell for each node."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference.server.client import TritonClient
from inference.system.ports import pick_free_ports
from launcher_scripts.main import main
from tests.integration.command import ROOT
from tests.waiting import until

pytestmark = pytest.mark.triton


def pod(
    template: dict[str, Any], number: int, data: Path, meeting_port: int
) -> subprocess.Popen[str]:
    """Start a pod's command here; the controller's variables are those of its documentation."""
    (container,) = template["spec"]["containers"]
    (script,) = container["args"]
    script = script.replace("/data", str(data)).replace(":29500", f":{meeting_port}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    controller = {
        "LWS_LEADER_ADDRESS": "127.0.0.1",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": str(number),
        "POD_IP": "127.0.0.1",
        "GROUP_INDEX": "0",
    }
    return subprocess.Popen(
        [*container["command"], script],
        cwd=ROOT,
        env=os.environ | variables | controller | {"PATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(pods: list[subprocess.Popen[str]]) -> None:
    for each in pods:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)


def test_pods_of_two_nodes_serve_one_model_and_end_together(tmp_path):
    sample = ("export=gpt3/sample", f"base_results_dir={tmp_path}")
    assert main([*sample, "stages=[export]"]) == 0
    (repository,) = tmp_path.rglob("model_repo")
    ports = pick_free_ports("127.0.0.1", 4)
    names = ("http", "grpc", "metrics")
    words = [f"deploy.{name}_port={port}" for name, port in zip(names, ports, strict=False)]
    given = (
        "cluster=kubernetes", "stages=[deploy]", "deploy.container=slipway:0.2.0",
        "cluster.kubernetes.claim=models", "cluster.gpus_per_node=1", "deploy.host=127.0.0.1",
        f"cluster.kubernetes.claim_path={repository.name}",
    )  # fmt: skip
    assert main([*sample, *given, *words]) == 0
    (path,) = tmp_path.rglob("*_manifests.yaml")
    group, _ = yaml.safe_load_all(path.read_text())
    templates = group["spec"]["leaderWorkerTemplate"]
    with ExitStack() as stack:
        pods = [
            stack.enter_context(pod(templates[name], number, repository.parent, ports[3]))
            for number, name in enumerate(("leaderTemplate", "workerTemplate"))
        ]
        stack.callback(end, pods)

        def is_ready() -> bool:
            ended = [each for each in pods if each.poll() is not None]
            assert not ended, ended[0].stdout.read()  # type: ignore[union-attr]
            with TritonClient(f"127.0.0.1:{ports[0]}", protocol="http") as client:
                return client.is_ready()

        until(is_ready, "a model whose ranks are in two pods", limit_s=120)
        # As the controller ends a group; its pods' shells pass the signal on.
        pods[0].send_signal(signal.SIGTERM)
        assert pods[0].wait(60) == 0
        pods[1].wait(60)
