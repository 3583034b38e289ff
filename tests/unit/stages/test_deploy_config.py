"""Places in object stores, times of a chain, and hosts of a server."""

from pathlib import Path
from typing import Any

import pytest

from export_scripts.triton.object_store import StoreLocation
from stages.base import JobSettings, Resources
from stages.deploy import DeployStage
from stages.deploy_config import DeployConfig, DeploySection
from stages.serving import server_environment, server_prefix


def test_folder_is_no_place_in_a_store():
    assert DeploySection().store is None
    assert DeploySection(repository="/repository").store is None


def test_place_in_a_store_is_served_instead_of_the_folder(tmp_path):
    config = DeployConfig(
        folder=tmp_path,
        model_name="m",
        repository="s3://http://store:9000/bucket/a/b",
    )
    assert config.store == StoreLocation("bucket", "a/b", "http://store:9000")
    assert config.source == "s3://http://store:9000/bucket/a/b"


@pytest.mark.parametrize(
    "repository",
    ["s3://user:hunter2@bucket/a", "s3://http://user:hunter2@store:9000/bucket/a"],
)
def test_password_in_an_address_is_refused_and_not_repeated(repository):
    with pytest.raises(ValueError, match=r"deploy\.repository") as caught:
        _ = DeploySection(repository=repository).store
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("programs", "prefix"),
    [
        ((), ()),
        (("mpirun",), ()),
        (("mpirun", "ssh"), ("mpirun", "-n", "1", "--allow-run-as-root")),
        (("mpirun", "rsh"), ("mpirun", "-n", "1", "--allow-run-as-root")),
    ],
)
def test_mpirun_starts_the_server_where_it_can_run(tmp_path, monkeypatch, programs, prefix):
    for name in ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in programs:
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = DeployConfig(folder=tmp_path, model_name="m", engine="fastertransformer")
    assert server_prefix(config) == prefix
    # Without mpirun, Open MPI must not start a daemon of its own.
    alone = server_environment(config).get("OMPI_MCA_ess_singleton_isolated")
    assert alone == (None if prefix else "1")


def stage_of(config: DeployConfig, folder: Path, *, limit_min: int = 60) -> DeployStage:
    resources = Resources(time_limit_min=limit_min)
    return DeployStage(JobSettings("deploy", folder, resources), config)


def test_time_limit_that_leaves_no_time_to_serve_is_refused(tmp_path):
    config = DeployConfig(folder=tmp_path, model_name="m")
    (problem,) = stage_of(config, tmp_path, limit_min=1).check()
    assert problem.startswith(
        "deploy.time_limit: 1 minute would leave no time to serve: the last 75 s"
    )
    assert not [*stage_of(config, tmp_path, limit_min=2).check()]


@pytest.mark.parametrize(
    ("uptime_s", "handover_s", "said"),
    [
        # A job of an hour serves for 58:45 minutes; after three quarters the next may start.
        (
            7 * 86400.0,
            None,
            "a chain of at least 229 jobs serves for deploy.uptime=7-00:00:00: each",
        ),
        (7200.0, 3000.0, "a chain of at least 8 jobs"),
        (1800.0, None, "one job is enough for deploy.uptime=7-00:00:00"),
    ],
)
def test_the_chain_of_jobs_is_told_beforehand(tmp_path, uptime_s, handover_s, said):
    config = DeployConfig(
        folder=tmp_path, model_name="m", uptime="7-00:00:00", uptime_s=uptime_s,
        handover_s=handover_s,
    )  # fmt: skip
    stage = stage_of(config, tmp_path)
    assert not [*stage.check()]
    assert next(stage.notes()).startswith(said)
    assert stage.is_chained == ("chain" in said)


def test_chain_that_cannot_be_is_refused(tmp_path):
    def problems(**keys: Any) -> list[str]:
        config = DeployConfig(
            folder=tmp_path, model_name="m", uptime="1-00:00:00", uptime_s=86400.0, **keys
        )
        return [*stage_of(config, tmp_path).check()]

    (found,) = problems(handover_s=3525.0)
    assert found.startswith("deploy.handover_s=3525 is not below the 3525 s that a job of 60 min")


@pytest.mark.parametrize("host", ["", "a b", "127.0.0.1:80", "999.1.1.1", "[::1]", "-x", "a\n"])
def test_what_is_neither_address_nor_host_is_refused(tmp_path, host):
    (problem,) = stage_of(
        DeployConfig(folder=tmp_path, model_name="m", host=host), tmp_path
    ).check()
    assert problem == f"deploy.host={host} is neither an address nor the name of a host."
    for good in ("0.0.0.0", "::1", "node-1", "a.b_c.example."):
        config = DeployConfig(folder=tmp_path, model_name="m", host=good)
        assert not [*stage_of(config, tmp_path).check()]


@pytest.mark.parametrize(
    ("engine", "nodes", "is_told"),
    [("pytorch", 2, False), ("fastertransformer", 1, False), ("fastertransformer", 2, True)],
)
def test_restarts_that_cannot_be_are_reported_beforehand(tmp_path, engine, nodes, is_told):
    config = DeployConfig(
        folder=tmp_path, model_name="m", engine=engine, nodes=nodes, max_restarts=3
    )
    notes = "\n".join(stage_of(config, tmp_path).notes())
    assert ("deploy.max_restarts=3 has no effect" in notes) is is_told
