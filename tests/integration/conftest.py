"""Repositories around the bundled sample model, converted once per session."""

import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.triton.repository import RepositoryRequest, build_repository
from inference.server.client import TritonClient
from inference.server.kinds import SLIPWAY, TRITONSERVER
from inference.server.server import ModelServer
from inference.system.ports import pick_free_ports
from tests.conftest import ROOT
from tests.integration.slurm_cluster import SlurmCluster, missing_programs
from tests.waiting import until

SampleRepository = Callable[..., Path]


@pytest.fixture(
    scope="module", params=[SLIPWAY, pytest.param(TRITONSERVER, marks=pytest.mark.triton)]
)
def host(request: pytest.FixtureRequest) -> str:
    """Return the server that serves a repository: each test runs with both."""
    return str(request.param)


@pytest.fixture(
    scope="module",
    params=[SLIPWAY, pytest.param(TRITONSERVER, marks=[pytest.mark.triton, pytest.mark.long])],
)
def usual_host(request: pytest.FixtureRequest) -> str:
    """Return the own server; a tritonserver, which other tests start, in `make soak` alone."""
    return str(request.param)


@pytest.fixture(scope="session")
def sample_weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return the sample model's fp32 shards for a number of ranks."""
    folder = tmp_path_factory.mktemp("sample_weights")
    archive = ROOT / "examples" / "gpt_books_5m" / "gpt_books_5m.nemo"

    def weights(tp_size: int) -> Path:
        request = ConversionRequest(
            checkpoint_path=archive, output_dir=folder, tp_size=tp_size, weight_data_type="fp32"
        )
        return convert(request).ft_dir

    return weights


@pytest.fixture(scope="session")
def sample_repository(
    sample_weights: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> SampleRepository:
    """Return a new repository around the sample model; keywords are RepositoryRequest's."""

    def repository(*, tp_size: int, **options: Any) -> Path:
        model_dir = tmp_path_factory.mktemp("repository") / "fastertransformer"
        weights = sample_weights(tp_size)
        shutil.copytree(weights, model_dir / "1" / weights.name)
        settings: dict[str, Any] = {"pp_size": 1, "max_batch_size": 8, "data_type": "fp32"}
        build_repository(
            RepositoryRequest(model_dir=model_dir, tp_size=tp_size, **(settings | options))
        )
        return model_dir.parent

    return repository


@pytest.fixture(scope="session")
def greedy_cases(shared: Path) -> list[dict[str, Any]]:
    """Return the sample model's recorded prompts and greedy answers."""
    cases: list[dict[str, Any]] = json.loads((shared / "sample_model" / "greedy.json").read_text())
    return cases


@pytest.fixture(scope="session")
def store_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = pick_free_ports("127.0.0.1", 1)[0]
    log = (tmp_path_factory.mktemp("moto") / "log").open("wb")
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return bool(urllib.request.urlopen(f"{url}/moto-api/", timeout=1).status == 200)
        except OSError:
            return False

    try:
        until(answers, "an answer of the S3 server")
        yield url
    finally:
        server.terminate()
        server.wait()
        log.close()


@pytest.fixture(scope="module")
def client(server: ModelServer) -> Iterator[TritonClient]:
    """Yields a client of the server of a module."""
    with TritonClient(server.address("grpc"), timeout_s=240) as connected:
        yield connected


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[SlurmCluster]:
    if missing := missing_programs():
        pytest.skip(
            f"Slurm is not installed ({', '.join(missing)}); on Debian and Ubuntu: "
            "apt-get install slurm-wlm libpmix-dev openmpi-bin"
        )
    # Unix sockets below it limit the length of its name.
    folder = Path(tempfile.mkdtemp(prefix="slt", dir="/tmp"))
    made = SlurmCluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def reachable(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm_cluster.environment[name])
