"""A stopped engine keeps no memory of its model, even while the engine itself is referred to."""

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from time import sleep
from typing import Any

import pytest
import torch

from inference.decoding.rows import SessionTurn
from inference.engine.engine import Engine
from inference.engine.errors import EngineFailedError
from inference.engine.options import EngineOptions
from inference.ranks.settings import Placement
from inference.system.process_memory import keep_loaded, memory_variables
from tests.conftest import UNFREEZE
from tests.contract import request_of
from tests.ft_folders import write_gpt
from tests.waiting import until

LONG, PROMPTS = 60, [[5, 3, 9]]
_RUN_AND_STOP = """
import sys
from inference.engine.engine import Engine
from inference.ranks.settings import Placement
from tests.engine_logits import prompt_logits

def held():
    text = open("/proc/self/status").read().partition("RssAnon:")[2]
    return int(text.split()[0]) >> 10

sizes = []
for _ in range(2):
    with Engine(sys.argv[1], Placement(device="cpu", int8_mode=int(sys.argv[2]))) as engine:
        prompt_logits(engine, [5, 3, 9])
        sizes.append(held())
    sizes.append(held())
print(*sizes)
"""

_RUN_AND_LEAVE = """
import atexit, contextlib, sys, threading, time
from inference.engine.engine import Engine
from inference.engine.errors import EngineFailedError
from inference.ranks.settings import Placement
from tests.conftest import UNFREEZE
from tests.contract import request_of

engine = Engine(sys.argv[1], Placement(device="cpu", tp_size=int(sys.argv[2])))
atexit.register(lambda: print(engine._thread.is_alive(), engine.healthy()))  # the last

def start():
    with contextlib.suppress(EngineFailedError):
        engine.start()

if sys.argv[3] == "loading":
    threading.Thread(target=start, daemon=True).start()
    while not engine._thread.is_alive():
        time.sleep(0.001)
else:
    engine.start()
    frames = []
    request = request_of(engine, [[5, 3, 9]], 60, end_id=0)
    engine.submit(request, on_step=lambda step: (frames.append(step), time.sleep(0.05)))
    while not frames:
        time.sleep(0.001)
"""


def tensors_of(engine: Engine) -> Iterator[torch.Tensor]:
    """Yield every tensor that is reachable from an engine."""
    seen: set[int] = set()
    waiting: list[Any] = [engine]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type) or type(each).__name__ == "module":
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif not (callable(each) and hasattr(each, "__globals__")):
            waiting += gc.get_referents(each)
        else:  # a function refers to all of its module by its globals
            waiting += [cell.cell_contents for cell in each.__closure__ or ()]


@pytest.mark.parametrize(("how", "tp_size"), [("stopped", 2), ("a step failed", 1)])
def test_no_tensor_outlives_the_stop(how, tp_size, tmp_path, monkeypatch):
    engine = Engine(
        write_gpt(tmp_path, tp_size=tp_size),
        Placement(tp_size=tp_size, device="cpu"),
        options=EngineOptions(rank_timeout_s=60),  # a collection of garbage holds the whole process
    )
    engine.start()
    keep_loaded()  # as servers do, which exempts what is loaded from collections of garbage
    start = request_of(engine, PROMPTS, 2, end_id=0, session_len=LONG + 10)
    engine.generate(start, turn=SessionTurn(1, starts=True))
    found = [weakref.ref(tensor) for tensor in tensors_of(engine)]
    assert len(found) > 20
    if how == "a step failed":
        # pytest keeps logged exceptions, whose frames hold the model.
        monkeypatch.setattr("inference.engine.base.logger.disabled", True)
        with monkeypatch.context() as patch:
            patch.setattr(
                "inference.decoding.sampler.Sampler.step",
                lambda *_: (_ for _ in ()).throw(RuntimeError("broken")),
            )
            future = engine.submit(request_of(engine, PROMPTS, LONG, end_id=0))
            with pytest.raises(RuntimeError, match="broken"):
                future.result()
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
    frames: list[Any] = []

    def note(step: Any) -> None:
        frames.append(step)
        sleep(0.02)  # the request should not end before the engine does

    future = engine.submit(request_of(engine, PROMPTS, LONG, end_id=0), on_step=note)
    until(lambda: len(frames) > 0)
    engine.stop()
    with pytest.raises(EngineFailedError, match="stopped"):
        future.result()
    gc.freeze()
    left = [tensor for ref in found if (tensor := ref()) is not None]
    assert not left, f"{len(left)} of {len(found)}: {[list(each.shape) for each in left[:5]]}"


@pytest.mark.parametrize("int8_mode", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_stopped_engine_gives_its_memory_back(int8_mode, tmp_path):
    sizes = {"head_num": 8, "size_per_head": 64, "inter_size": 2048, "num_layer": 16}
    ft_dir = write_gpt(tmp_path, **sizes)  # 200 MB in fp32
    done = subprocess.run(
        [sys.executable, "-c", _RUN_AND_STOP, str(ft_dir), str(int8_mode)],
        env=os.environ | memory_variables(),  # as servers have them
        check=True,
        capture_output=True,
        text=True,
    )
    first, after_first, second, after_second = map(int, done.stdout.split())
    assert after_first < first - 40
    assert after_second < second - 40
    assert after_second < after_first + 20  # MiB


@pytest.mark.parametrize(
    ("tp_size", "when"),
    [
        (1, "decoding"),
        pytest.param(2, "decoding", marks=pytest.mark.long),
        pytest.param(1, "loading", marks=pytest.mark.long),
    ],
)
def test_the_end_of_a_process_stops_its_engine(tp_size, when, tmp_path):
    ft_dir = write_gpt(tmp_path, tp_size=tp_size)
    done = subprocess.run(
        [sys.executable, "-c", _RUN_AND_LEAVE, str(ft_dir), str(tp_size), when],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split(maxsplit=1) == ["False", "the engine was stopped\n"]
