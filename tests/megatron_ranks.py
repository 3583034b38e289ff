"""Programs that run megatron-core on the CPU, in processes that are ranks of gloo.

A program is the `main` of a module of tests, which takes the file of a plan. This environment's
release is imported once, by a process that forks the programs, which fork the ranks; other releases
are run by their interpreters. The tests' own process cannot fork them: it has threads, whose locks
a forked process would wait for.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import multiprocessing
import multiprocessing.connection
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 300
_FORK = multiprocessing.get_context("fork")
# Interpreters of other releases than this environment's, separated as in PATH.
OTHERS = [*filter(None, os.environ.get("SLIPWAY_MEGATRON_CORE", "").split(os.pathsep))]


def run_ranks(
    module: str, items: Sequence[Any], work_dir: Path, *, python: str | None = None
) -> None:
    """Run a program with a plan, by another interpreter than this if given.

    The `ranks` of a record are the number of processes that work on it, the first ones.
    """
    plan, log = (work_dir / f"{module}.{kind}" for kind in ("json", "log"))
    plan.write_text(json.dumps([(item.ranks, dataclasses.asdict(item)) for item in items]))
    if python in (None, sys.executable):
        importlib.metadata.version("megatron-core")  # raises if it is not installed
        run_forked(importlib.import_module(module).main, plan, log)
        return
    with log.open("w") as out:
        done = subprocess.run(
            [python or sys.executable, "-m", module, str(plan)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=out,
            timeout=DEADLINE_S,
        )
    assert done.returncode == 0, log.read_text()[-6000:]


def run_forked(main: Callable[[Path], int], path: Path, log: Path) -> None:
    """Run `main` in a process that is forked from one which has imported torch."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    request = (main.__module__, main.__name__, str(path), str(log))
    print(json.dumps(request), file=server.stdin, flush=True)
    assert server.stdout.readline() == "0\n", log.read_text()[-6000:]


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the process that forks programs; it ends with this one."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "tests.megatron_ranks"]
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)


def _serve() -> None:
    """Fork a program for each line of the input, and print its exit status."""
    with contextlib.suppress(ImportError):
        _import_megatron()
    for line in sys.stdin:
        module, name, path, log = json.loads(line)
        main = getattr(importlib.import_module(module), name)
        process = _FORK.Process(target=_forked, args=(main, Path(path), Path(log)))
        process.start()
        process.join(DEADLINE_S)
        if process.is_alive():
            process.kill()
            process.join()
        print(process.exitcode, flush=True)


def _forked(main: Callable[[Path], int], path: Path, log: Path) -> None:
    with log.open("w") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
        sys.stdout = sys.stderr = out
        torch.set_num_threads(1)
        sys.exit(main(path))


def _import_megatron() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async as _files  # noqa: F401
    from megatron.core.models import gpt as _gpt  # noqa: F401
    from megatron.core.transformer.moe import moe_utils as _moe  # noqa: F401


def be_ranks(plan: Path, work: Callable[[dict[str, Any]], None]) -> int:
    """Fork the ranks, each of which works on its items of the plan; return the exit status.

    One that fails, for which the others would wait, ends them.
    """
    # megatron-core asks for CUDA's device, and puts a tied head there, wherever its weights are.
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_: None
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_: self
    _import_megatron()
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.transformer.moe import moe_utils

    filesystem_async._process_memory = lambda: 0  # only logged, and asks for psutil
    # Its queue would be that of a process which each rank starts, and which imports torch.
    filesystem_async._results_queue = queue.Queue()
    # 0.16 compares it with None where it was not imported.
    vars(moe_utils).setdefault("te_general_gemm", None)
    most = max(count for count, _ in json.loads(plan.read_text()))
    ranks = [_FORK.Process(target=_rank, args=(plan, rank, work)) for rank in range(most)]
    for rank in ranks:
        rank.start()
    running = list(ranks)
    while running and not any(rank.exitcode for rank in ranks):
        multiprocessing.connection.wait([rank.sentinel for rank in running])
        running = [rank for rank in running if rank.exitcode is None]
    for rank in running:
        rank.kill()
    return max(rank.exitcode or 0 for rank in ranks)


def _rank(plan: Path, rank: int, work: Callable[[dict[str, Any]], None]) -> None:
    from megatron.core import tensor_parallel

    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    for number, (world_size, item) in enumerate(json.loads(plan.read_text())):
        if rank >= world_size:
            continue
        place = f"file://{plan.with_suffix(f'.{os.getppid()}.{number}')}"
        torch.distributed.init_process_group(
            "gloo", init_method=place, rank=rank, world_size=world_size
        )
        work(item)
        # With it end all groups that megatron-core has made, each of which has threads.
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _serve()
