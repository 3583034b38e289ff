"""Tokens/s of NVIDIA's C++ backend and of our engine, side by side through tritonserver.

    python -m benchmarks.peers.fastertransformer.speed --work-dir DIR [--models gpt-350m gptj-6b]

One request holds the whole batch, prompts of 128 tokens and 128 new ones; the engines take turns,
and the median of the repeats counts.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.models import SIZES, sized_model
from benchmarks.program import Cell, run
from benchmarks.served import Served, both, tensors

_LENGTH = 128


def models(work_dir: Path, names: Sequence[str], tp_size: int) -> dict[str, Served]:
    """Return what is served, in fp16 and, where both engines can, in int8."""
    served = {}
    for name in names:
        folder = sized_model(SIZES[name], work_dir, tp_size=tp_size).ft_dir
        served[f"{name}_fp16"] = Served(folder, "fp16", tp_size=tp_size)
        if SIZES[name].family == "gpt":
            served[f"{name}_int8"] = served[f"{name}_fp16"]._replace(is_int8=True)
    return served


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the rates of both engines with each model and batch."""
    served = models(args.work_dir, args.models, args.tp)
    with both(args.work_dir / "speed", served) as clients:
        for model in served:
            for batch in args.batch:
                ids = np.random.default_rng(1).integers(1, 50000, (batch, _LENGTH)).tolist()
                inputs = tensors(ids, end_id=50256, request_output_len=_LENGTH)
                times: dict[str, list[float]] = {engine: [] for engine in clients}
                for number in range(1 + args.repeats):
                    for engine, client in clients.items():
                        began = time.perf_counter()
                        client.infer(model, inputs)
                        if number:  # the first answer of each warms up
                            times[engine].append(time.perf_counter() - began)
                for engine, each in times.items():
                    rate = batch * _LENGTH / statistics.median(each)
                    yield f"{model}, batch {batch}", engine, f"{rate:.0f} tokens/s"


if __name__ == "__main__":
    run(
        measure,
        __doc__,
        work_dir={},
        tp={},
        repeats={},
        models={"choices": SIZES, "nargs": "+", "default": ["gpt-350m"]},
        batch={"default": [1, 8, 32]},
    )
