"""vLLM over two nodes of a real Slurm, with a stand-in for its command."""

import json
import os
import shlex
import sys

import pytest

from tests.integration.command import finish, processes_of, start
from tests.integration.slurm_runs import CLUSTER, mpi
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("reachable")]

# Serves on the first node once the second has reached it, as `vllm serve --nnodes 2` does.
STAND_IN = """
import argparse, http.server, json, os, pathlib, socket, sys, time
options = argparse.ArgumentParser()
options.add_argument("words", nargs=2)
options.add_argument("--headless", action="store_true")
for name in ("nnodes", "node-rank", "master-addr", "master-port", "host", "port",
             "tensor-parallel-size", "pipeline-parallel-size", "served-model-name", "dtype",
             "shutdown-timeout"):
    options.add_argument("--" + name)
given = options.parse_args(sys.argv[1:])
note = dict(vars(given), node=os.environ["SLURMD_NODENAME"])
with open("{notes}/" + given.node_rank + ".jsonl", "a") as file:
    file.write(json.dumps(note) + "\\n")
address = (given.master_addr, int(given.master_port))
if given.headless:
    while True:
        try:
            link = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.1)
    link.recv(1)
    sys.exit(0)
other, _ = socket.create_server(address).accept()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    do_POST = do_GET

http.server.ThreadingHTTPServer((given.host, int(given.port)), Handler).serve_forever()
"""


def test_a_model_over_two_nodes_is_served_and_starts_again(tmp_path, slurm_cluster):
    program, model = tmp_path / "vllm", tmp_path / "model"
    script = tmp_path / "vllm.py"
    script.write_text(STAND_IN.format(notes=tmp_path))
    # The line of an interpreter allows no spaces in its path.
    program.write_text(f'#!/bin/sh\nexec {shlex.join((sys.executable, str(script)))} "$@"\n')
    program.chmod(0o755)
    model.mkdir()
    (model / "config.json").write_text("{}")
    sizes = ("export.model.tensor_model_parallel_size=8", "cluster.gpus_per_node=8",
             "export.triton_deployment.pipeline_model_parallel_size=2")  # fmt: skip
    command = start(
        "export=gpt3/sample", "stages=[deploy]", *CLUSTER, *sizes, "deploy.engine=vllm",
        f"deploy.executable={program}", f"deploy.repository={model}", "deploy.http_port=0",
        "deploy.restart_backoff_s=0", f"base_results_dir={tmp_path}/results",
        f"cluster.mpi={mpi(os.environ.get('SLURM_CONF'))}",
    )  # fmt: skip
    text = finish(command)
    assert command.returncode == 0, text
    until(lambda: any((tmp_path / "results").glob("*/*/deploy/endpoint.json")), limit_s=120)

    def noted(rank: int) -> list[dict[str, str]]:
        lines = (tmp_path / f"{rank}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    (first,), (second,) = noted(0), noted(1)
    assert {first["node"], second["node"]} == {"n1", "n2"}
    assert first["master_port"] == second["master_port"]
    (path,) = (tmp_path / "results").glob("*/*/deploy/endpoint.json")
    assert json.loads(path.read_text())["nodes"] == 2
    # The loss of the first node's server restarts all of them.
    for pid, line in processes_of(program).items():
        if "--node-rank 0" in line:
            os.kill(pid, 9)
    until(lambda: len(noted(0)) == len(noted(1)) == 2, "a second start", limit_s=120)
    until(lambda: path.exists() and json.loads(path.read_text())["restarts"] == 1, limit_s=120)
    ended = start("action=cancel", f"base_results_dir={tmp_path}/results")
    text = finish(ended)
    assert ended.returncode == 0, text
    until(lambda: not processes_of(program), "the end of every process")
