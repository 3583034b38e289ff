"""A certificate that asks a server, as a job of a real Slurm."""

import json

import pytest

from tests.integration.command import FREE_PORTS, finish, processes_of, start
from tests.integration.slurm_runs import CLUSTER
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("reachable")]


def test_a_job_certifies_what_is_served_and_ends_its_server(tmp_path, slurm_cluster):
    command = start(
        "export=gpt3/sample", "stages=[certify]", *CLUSTER, *FREE_PORTS, "wait=true",
        f"base_results_dir={tmp_path}", "certify.serve=true", "certify.protocol=grpc",
        "certify.layers=false", "certify.samples=2", "certify.batch_sizes=[2]",
        "certify.input_len=8", "certify.output_len=3",
        "export.model.tensor_model_parallel_size=1",
    )  # fmt: skip
    text = finish(command, timeout_s=300)
    assert command.returncode == 0, text
    (path,) = tmp_path.rglob("certificate.json")
    certificate = json.loads(path.read_text())
    assert certificate["verdict"].startswith("equal up to served answers")
    parts = {part["name"]: part for part in certificate["parts"]}
    assert parts["served"]["rows"][0]["same_tokens"] == 1
    assert parts["served"]["status"] in ("equal", "equal up to")
    until(lambda: not slurm_cluster.run("squeue", "-h"), "the end of the job")
    until(lambda: not processes_of(tmp_path), "the end of its server")
