"""Ranks in processes of their own: what becomes of requests and processes when one fails."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from inference.decoding.rows import GenerationRequest, SequenceRequest
from inference.decoding.sampling_params import SamplingParams
from inference.engine.engine import Engine
from inference.engine.errors import EngineFailedError
from inference.ranks.processes import threads_per_rank
from inference.ranks.settings import Placement
from inference.server.processes import descendants
from inference.system.control_groups import usable_cores
from tests.conftest import ROOT
from tests.engine_logits import prompt_logits
from tests.ft_folders import write_gpt
from tests.waiting import lives, until

NOTICE_S = 60.0  # of a slow machine; by default a rank may be silent for 7 s


@pytest.fixture(scope="module")
def ft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt(tmp_path_factory.mktemp("gpt"), tp_size=2, max_pos_seq_len=4096)


def children() -> set[int]:
    return set(descendants(os.getpid()))


def endless(engine: Engine) -> GenerationRequest:
    options = SamplingParams(end_id=engine.limits.end_id, min_length=4000)
    row = SequenceRequest((1, 2, 3), 4000, options, context_ids=(1, 2, 3), returned_ids=(1, 2, 3))
    return GenerationRequest((row,), padded_len=3)


@pytest.mark.parametrize(
    ("number", "message", "busy"),
    [(signal.SIGKILL, "SIGKILL", True), (signal.SIGSTOP, "has not answered", False)],
)
def test_a_bad_request_costs_itself_alone_and_a_failed_rank_everything(
    ft_dir, number, message, busy
):
    before = children()
    engine = Engine(ft_dir, Placement(tp_size=2, device="cpu"))
    engine.start()
    try:
        workers = list(children() - before)
        assert len(workers) == 1
        refuse_a_request(engine)
        future = engine.submit(endless(engine)) if busy else None
        time.sleep(0.2)
        os.kill(workers[0], number)
        until(lambda: engine.healthy() is not None, "the engine's notice", limit_s=NOTICE_S)
        assert message in (engine.healthy() or "healthy")
        assert (engine.healthy() or "").startswith(("rank 1", "a rank"))
        if future is not None:
            with pytest.raises(EngineFailedError, match=message):
                future.result(NOTICE_S)
        with pytest.raises(EngineFailedError, match=message):
            engine.submit(endless(engine))
        until(lambda: not any(map(lives, workers)), "the end of the workers")
    finally:
        engine.stop()


def refuse_a_request(engine: Engine) -> None:
    """Have the engine refuse a request that cannot be decoded, and answer another one."""
    penalty: Any = "hot"
    options = SamplingParams(end_id=engine.limits.end_id, repetition_penalty=penalty)
    row = SequenceRequest((1, 2, 3), 4, options, context_ids=(1, 2, 3))
    with pytest.raises(ValueError, match="hot"):
        engine.generate(GenerationRequest((row,), padded_len=3))
    assert engine.healthy() is None
    assert len(prompt_logits(engine, [1, 2, 3])) == 3
    assert engine.load().running == 0


def program(text: str) -> str:
    """Return the output of a program."""
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def test_forked_workers_serve_the_engine_under_their_own_names_and_end_with_their_process(
    ft_dir, tmp_path
):
    """Modules that are imported before a fork ask for no GPU; with CUDA's driver none is forked.

    A mapped file of its name stands for the driver, which loads with the first call of CUDA.
    """
    driver = tmp_path / "libcuda.so.1"
    driver.write_bytes(bytes(4096))
    name, *forked = program(f"""
import importlib, mmap, os, torch
from pathlib import Path
from unittest import mock
from inference.host.engine_process import _MODULES
names = ("is_available", "device_count", "_lazy_init", "get_device_properties")
asked = mock.Mock(side_effect=SystemExit("a GPU was asked for"))
with mock.patch.multiple(torch.cuda, **dict.fromkeys(names, asked)):
    for name in _MODULES:
        importlib.import_module(name)
from inference.engine.engine import Engine
from inference.ranks.processes import fork_workers
from inference.ranks.settings import Placement
from inference.server.processes import descendants
fork_workers(Path({str(ft_dir)!r}), 2)
(forked,) = descendants(os.getpid())
with Engine({str(ft_dir)!r}, Placement(tp_size=2, device="cpu")):
    assert descendants(os.getpid()) == [forked]
    print(Path(f"/proc/{{forked}}/cmdline").read_bytes().rstrip(b"\\0").split(b"\\0")[1:4])
assert descendants(os.getpid()) == []
fork_workers(Path({str(ft_dir)!r}), 3)
forked = descendants(os.getpid())
print(*forked, sep="\\n", flush=True)
with open({str(driver)!r}, "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
fork_workers(Path({str(ft_dir)!r}), 4)
assert descendants(os.getpid()) == forked
os._exit(0)
""").splitlines()
    assert name == "[b'-m', b'inference.ranks.worker', b'--rank=1']"
    assert len(forked) == 2
    until(lambda: not any(lives(int(pid)) for pid in forked), "the end of the workers")


def test_models_of_texts_import_no_torch():
    modules = ("python_backend", "encoder_backend", "text_generation", "nemo_generation")
    imports = "; ".join(f"import inference.backend.{name}" for name in modules)
    text = f"import sys, inference.ranks.processes; {imports}; print('torch' in sys.modules)"
    assert program(text) == "False\n"


def test_workers_end_when_rank_0_is_killed(ft_dir):
    program = f"""
import time
from inference.engine.engine import Engine
from inference.ranks.settings import Placement
engine = Engine({str(ft_dir)!r}, Placement(tp_size=2, device="cpu"))
engine.start()
print("ready", flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        assert rank_0.stdout.readline() == "ready\n"
        workers = descendants(rank_0.pid)
        assert len(workers) == 1
        rank_0.kill()
    until(lambda: not any(map(lives, workers)), "the end of the workers")


def test_every_rank_checks_the_folder(tmp_path):
    ft_dir = write_gpt(tmp_path, tp_size=2)
    (ft_dir / "model.layers.0.attention.dense.weight.1.bin").unlink()
    before = children()
    engine = Engine(ft_dir, Placement(tp_size=2, device="cpu"))
    with pytest.raises(EngineFailedError) as error:
        engine.start()
    for rank in (0, 1):
        assert f"rank {rank}: CheckpointMismatchError" in str(error.value)
    assert "model.layers.0.attention.dense.weight.1.bin" in str(error.value)
    assert children() <= before


def test_folder_cut_for_other_ranks_is_refused(ft_dir):
    with pytest.raises(EngineFailedError, match="split for tensor_para_size=2, but 1 ranks"):
        Engine(ft_dir, Placement(tp_size=1, device="cpu")).start()


def test_cores_are_divided_among_local_ranks(monkeypatch):
    cores = usable_cores()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_per_rank(1) == cores
    assert threads_per_rank(2) == max(1, cores // 2)
    assert threads_per_rank(1000) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_per_rank(1) == 1
