"""PyTriton's server on several ranks, each a process that a launcher started, and its client."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export_scripts.conversion.convert import ConversionRequest, convert
from inference.backend.text_generation import TextModel
from inference.backend.tokenizer import load_tokenizer
from inference.engine.engine import Engine
from inference.ranks.settings import Placement
from inference.server.client import TritonClient
from inference.server.kinds import SERVER_VARIABLE
from inference.server.processes import descendants
from inference.server.tensors import as_tensor
from inference.system.ports import pick_free_ports
from inference.system.private_folder import PrivateFolder
from tests.conftest import ROOT
from tests.integration.command import FREE_PORTS, processes_of, served
from tests.text_requests import infer, text_model
from tests.tiny_text_gpt2 import write_tiny_gpt2
from tests.waiting import lives, until

pytestmark = pytest.mark.triton

SAMPLE = ROOT / "examples" / "gpt_books_5m" / "gpt_books_5m.nemo"
NAME = "gpt_books_5m_nemo"
PROMPTS = ["It was the best", "My dear", "The old man looked at the", ""]
LENGTHS = [12, 3, 8, 5]
READY_S = 90
# A lost rank must be known, and everything ended, within this time.
END_S = 20
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_RANK")
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


class Run:
    """One run of the server: its processes, ports and output."""

    def __init__(self, folder: Path, model: Path | str, *options: str) -> None:
        self.http, self.grpc, metrics, self.rendezvous = pick_free_ports("127.0.0.1", 4)
        self.log = folder / "server.log"
        self.command = [sys.executable, "-m", "inference.pytriton.server", *options]
        self.command += ["--hf-model-name", str(model), "--output-dir", str(folder / "models")]
        self.command += ["--host", "127.0.0.1", "--master-port", str(self.rendezvous)]
        self.command += ["--http-port", str(self.http), "--grpc-port", str(self.grpc)]
        self.command += ["--metrics-port", str(metrics)]
        self.processes: list[subprocess.Popen[str]] = []
        own = ("OMPI_", "PMIX_", "SLURM_", "MASTER_")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(own)}
        self.environment.pop(SERVER_VARIABLE, None)  # a developer's, with which it is the server
        self.environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.environment["TMPDIR"] = str(self.scratch)

    @property
    def scratch(self) -> Path:
        """A short path: sockets lie in it."""
        path = Path(tempfile.gettempdir()) / f"pt{self.rendezvous}"
        path.mkdir(exist_ok=True)
        return path

    def leftovers(self) -> list[Path]:
        return list(self.scratch.glob("slipway-pytriton-*"))

    def start(self, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        with self.log.open("a") as log:
            process = subprocess.Popen(
                command,
                env=self.environment | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def start_ranks(self, count: int, *, job: str = "job") -> None:
        """Start ranks as mpirun would, with its variables."""
        for rank in range(count):
            variables = dict.fromkeys(RANK_VARIABLES, str(rank))
            variables |= dict.fromkeys(SIZE_VARIABLES, str(count))
            self.start(self.command, PMIX_NAMESPACE=job, **variables)

    def mpirun(self, count: int) -> subprocess.Popen[str]:
        launcher = ["mpirun", "-n", str(count), "--oversubscribe", "--bind-to", "none"]
        if os.getuid() == 0:
            launcher.append("--allow-run-as-root")
        return self.start([*launcher, *self.command])

    def wait_until_ready(self, model: str = NAME) -> None:
        with TritonClient(f"127.0.0.1:{self.http}", protocol="http") as client:
            deadline = time.monotonic() + READY_S
            while not client.is_ready(model):
                assert time.monotonic() < deadline, self.output()
                assert all(each.poll() is None for each in self.processes), self.output()
                time.sleep(0.1)

    def output(self) -> str:
        return self.log.read_text()

    def all_processes(self) -> list[int]:
        return [pid for each in self.processes for pid in (each.pid, *descendants(each.pid))]

    def rank_processes(self) -> dict[int, int]:
        """Return the process of each rank, whoever started it."""
        found = {}
        for pid in self.all_processes():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"inference.pytriton.server" in words[1:4]:
                text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
                variables = dict(word.split("=", 1) for word in text.split("\0") if "=" in word)
                found[int(variables["OMPI_COMM_WORLD_RANK"])] = pid
        return found

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + END_S
        while any(each.poll() is None for each in self.processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def running(folder: Path, model: Path | str, *options: str) -> Iterator[Run]:
    run = Run(folder, model, *options)
    try:
        yield run
    finally:
        run.stop()
        shutil.rmtree(run.scratch, ignore_errors=True)


def ask(
    run: Run,
    prompts: list[str],
    lengths: list[int],
    *,
    protocol: str = "grpc",
    model: str = NAME,
    **more: int,
) -> Any:
    port = run.grpc if protocol == "grpc" else run.http
    tensors = {
        "prompts": as_tensor(prompts, "BYTES"),
        "request_output_len": as_tensor(lengths, "UINT32"),
    }
    tensors |= {name: as_tensor([value] * len(prompts), "UINT32") for name, value in more.items()}
    with TritonClient(f"127.0.0.1:{port}", protocol=protocol, timeout_s=240) as client:
        return client.infer(model, tensors)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The answers of one process without a server."""
    folder = tmp_path_factory.mktemp("one")
    request = ConversionRequest(SAMPLE, folder, tp_size=1, weight_data_type="fp32")
    ft_dir = convert(request).ft_dir
    tensors = {
        "prompts": as_tensor(PROMPTS, "BYTES"),
        "request_output_len": as_tensor(LENGTHS, "UINT32"),
    }
    with Engine(ft_dir, Placement(device="cpu")) as engine:
        model = text_model(TextModel, engine, load_tokenizer(ft_dir))
        beams = tensors | {"beam_width": as_tensor([3] * 4, "UINT32")}
        return [infer(model, [each])[0] for each in (tensors, beams)]


def assert_same(answer: Any, expected: Any) -> None:
    assert answer["sentences"].tolist() == expected["sentences"].tolist()
    for name in ("sequence_length", "sequence_tokens"):
        assert np.array_equal(answer[name], expected[name])
    # Sums over ranks are taken in another order; 12 log-probabilities add up.
    assert np.allclose(answer["cum_log_probs"], expected["cum_log_probs"], atol=1e-3)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A server on TP 2, one instance, so that requests have to wait for each other."""
    options = ("--tp", "2", "--instances", "1", "--device", "cpu")
    with running(tmp_path_factory.mktemp("two"), SAMPLE, *options) as run:
        run.start_ranks(2)
        run.wait_until_ready()
        yield run


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_answers_of_two_ranks_equal_those_of_one_process(two_ranks, expected, protocol):
    assert_same(ask(two_ranks, PROMPTS, LENGTHS, protocol=protocol), expected[0])
    assert_same(ask(two_ranks, PROMPTS, LENGTHS, protocol=protocol, beam_width=3), expected[1])


def test_interface_is_the_one_of_the_contract(two_ranks):
    url = f"http://127.0.0.1:{two_ranks.http}/v2/models/{NAME}/config"
    with urllib.request.urlopen(url) as reply:
        config = json.load(reply)
    assert config["max_batch_size"] == 128
    assert "dynamic_batching" in config
    tensors = {
        each["name"]: (each["data_type"], each["dims"], each.get("optional", False))
        for each in (*config["input"], *config["output"])
    }
    assert tensors == {
        "prompts": ("TYPE_STRING", [1], False),
        "request_output_len": ("TYPE_UINT32", [1], False),
        "beam_width": ("TYPE_UINT32", [1], True),
        "sentences": ("TYPE_STRING", [-1, 1], False),
        "sequence_length": ("TYPE_INT64", [-1], False),
        "cum_log_probs": ("TYPE_FP32", [-1], False),
        "sequence_tokens": ("TYPE_INT64", [-1], False),
    }


def test_a_refused_request_does_not_harm_the_others(two_ranks, expected):
    answers: dict[int, Any] = {}

    def client(number: int) -> None:
        lengths = [0] * 4 if number % 3 == 1 else LENGTHS
        try:
            answers[number] = ask(two_ranks, PROMPTS, lengths)
        except Exception as error:
            answers[number] = str(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, answer in answers.items():
        if number % 3 == 1:
            assert "request_output_len[0]=0 must be in [1, 511]" in answer
        else:
            assert_same(answer, expected[0])


def run_client(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inference.client", "generate", "--model", NAME, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_client_of_ensembles_asks_a_text_model_too(two_ranks, expected):
    url = f"http://localhost:{two_ranks.http}"
    done = run_client("--url", url, "--output-len", "3", "--json", "Sir", PROMPTS[1])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[1] == [expected[0]["sentences"][1, 0, 0].decode()]


def test_a_second_run_at_the_same_ports_is_refused_and_the_first_goes_on(
    two_ranks, expected, tmp_path
):
    with running(tmp_path, SAMPLE, "--tp", "2", "--device", "cpu") as second:
        place = second.command.index("--master-port") + 1
        second.command[place] = str(two_ranks.rendezvous)
        second.start_ranks(2, job="other")
        assert [each.wait(60) for each in second.processes] == [1, 1]
        said = second.output()
        assert f"port {two_ranks.rendezvous} of the rendezvous is in use" in said
        assert "belongs to another launch (" in said
    with running(tmp_path, SAMPLE, "--device", "cpu") as third:
        third.command[third.command.index("--http-port") + 1] = str(two_ranks.http)
        third.start(third.command)
        assert third.processes[0].wait(60) == 1
        assert f"--http-port={two_ranks.http} is in use by process" in third.output()
    assert_same(ask(two_ranks, PROMPTS, LENGTHS), expected[0])


def test_strangers_reach_the_front_alone_and_no_secret_stands_in_arguments(
    two_ranks,
):
    for path in ("/v2/repository/models/a/load", "/v2/systemsharedmemory/region/a/register"):
        url = f"http://127.0.0.1:{two_ranks.http}{path}"
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url, data=b"{}")
        assert caught.value.code == HTTPStatus.FORBIDDEN
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in two_ranks.all_processes()]
    assert not [each for each in commands if "tritonserver" in each]
    assert not [each for each in commands if "token" in each]


def test_lost_rank_fails_the_request_and_ends_everything(two_ranks):
    """The last test of this server."""
    everything = two_ranks.all_processes()
    failures: list[str] = []
    answered = threading.Event()

    def client() -> None:
        try:
            while True:
                ask(two_ranks, ["It was"] * 4, [50] * 4)
                answered.set()
        except Exception as error:
            failures.append(str(error))

    # With two clients, a request is in progress at every moment.
    threads = [threading.Thread(target=client) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert answered.wait(READY_S)
    os.kill(two_ranks.rank_processes()[1], signal.SIGKILL)
    for thread in threads:
        thread.join(END_S)
    assert len(failures) == 2
    assert any("rank 1" in each for each in failures), failures
    until(lambda: not any(map(lives, everything)), limit_s=END_S)
    assert two_ranks.processes[0].wait(1) == 1
    assert "rank 1" in two_ranks.output()


def test_ranks_and_server_end_when_rank_0_is_killed(tmp_path):
    source = write_tiny_gpt2(tmp_path / "tiny")
    options = ("--tp", "2", "--instances", "1", "--device", "cpu")
    with running(tmp_path, source, *options) as run:
        run.start_ranks(2)
        run.wait_until_ready("tiny")
        everything = run.all_processes()
        os.kill(run.rank_processes()[0], signal.SIGKILL)
        until(lambda: not any(map(lives, everything)), limit_s=END_S)
        assert run.processes[1].wait(1) in (0, 1)  # its server may have ended in order
        PrivateFolder("pytriton", place=run.scratch).remove()  # as the next server does
        assert run.leftovers() == []


@pytest.mark.long
def test_a_model_that_does_not_load_ends_every_rank_with_the_reason(tmp_path):
    source = write_tiny_gpt2(tmp_path / "tiny")
    request = ConversionRequest(source, tmp_path, tp_size=2, weight_data_type="fp32")
    ft_dir = convert(request).ft_dir
    (ft_dir / "model.wpe.bin").unlink()
    with running(tmp_path, ft_dir, "--tp", "2", "--device", "cpu") as run:
        run.start_ranks(2)
        assert [each.wait(60) for each in run.processes] == [1, 1]
        assert "model.wpe.bin" in run.log.read_text()


needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None,
    reason="mpirun is not installed; on Debian and Ubuntu: apt-get install openmpi-bin",
)


@needs_mpirun
@pytest.mark.parametrize("has_triton", [pytest.param(False, marks=pytest.mark.long), True])
def test_ranks_of_mpirun_answer_as_one_and_end_in_order_with_the_first(
    tmp_path, expected, has_triton
):
    options = ("--pp", "2", "--instances", "1", "--device", "cpu")
    with running(tmp_path, SAMPLE, *options, "--model-name", "other.name") as run:
        if has_triton:
            run.environment[SERVER_VARIABLE] = os.environ.get(SERVER_VARIABLE, f"{ROOT}/.triton")
        launcher = run.mpirun(2)
        run.wait_until_ready("other.name")
        asked: list[dict[str, Any]] = [{}, {"beam_width": 3}]
        for answer, more in zip(expected, asked, strict=True):
            assert_same(ask(run, PROMPTS, LENGTHS, model="other.name", **more), answer)
        everything = run.all_processes()
        ranks = run.rank_processes()
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[0], signal.SIGTERM)
        assert launcher.wait(END_S) == 0, run.output()
        until(lambda: not any(map(lives, everything)), limit_s=END_S)
        assert run.leftovers() == []


def test_deploy_stage_serves_and_ends_all_ranks(tmp_path):
    results = tmp_path / "gpt_books_5m" / "export_tp2_pp1_fp16_fp32"
    words = ["export=gpt3/sample", "stages=[deploy]", f"base_results_dir={tmp_path}", *FREE_PORTS]
    with served(results, *words, "deploy.server=pytriton", "deploy.interface=nemo") as endpoint:
        assert (endpoint["model"], endpoint["ensemble"]) == ("GPT", None)
        request = {
            "tasks": as_tensor(["text_generation"], "BYTES"),
            "prompts": as_tensor(PROMPTS[:1], "BYTES"),
            "max_length": np.array([[4]], np.int32),
        }
        with TritonClient(f"127.0.0.1:{endpoint['http']}", protocol="http") as client:
            outputs = client.infer("GPT", request)
        assert outputs["sentences"][0, 0].decode().startswith(PROMPTS[0])
    until(lambda: not processes_of(tmp_path), "the end of every rank")
