"""Tokens/s of NVIDIA's C++ backend and of our engine, side by side through tritonserver.

    python -m benchmarks.peers.fastertransformer.speed --work-dir DIR [--models gpt-350m gptj-6b]

One request holds the whole batch, prompts of 128 tokens and 128 new ones; the engines take turns,
and the median of the repeats counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.models import SIZES, write_sized
from benchmarks.peers.fastertransformer.served import ENGINES, Served, Tensors, ask, both, tensors
from inference.server.client import TritonClient

_LENGTH = 128
_VOCAB = 50304


def models(work_dir: Path, names: Sequence[str], tp_size: int) -> dict[str, Served]:
    """Return what is served, in fp16 and, where both engines can, in int8."""
    served = {}
    for name in names:
        folder = work_dir / name / f"{tp_size}-gpu"
        write_sized(SIZES[name], _VOCAB, folder, "cuda", tp_size=tp_size)
        served[f"{name}_fp16"] = Served(folder, "fp16", tp_size=tp_size)
        if SIZES[name].family == "gpt":
            served[f"{name}_int8"] = served[f"{name}_fp16"]._replace(is_int8=True)
    return served


def seconds(client: TritonClient, model: str, inputs: Tensors) -> float:
    """Return the time of one answer; not a number when there is none."""
    began = time.perf_counter()
    answer = ask(client, model, inputs)
    if isinstance(answer, str):
        print(f"{model}: {answer}", flush=True)
        return float("nan")
    return time.perf_counter() - began


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="keeps the models")
    parser.add_argument("--models", choices=SIZES, nargs="+", default=["gpt-350m"])
    parser.add_argument("--tp", type=int, default=1, help="GPUs")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    served = models(args.work_dir.resolve(), args.models, args.tp)
    with both(args.work_dir.resolve() / "speed", served) as clients:
        print(f"| model | batch | {' | '.join(ENGINES)} |\n|---|---|---|---|", flush=True)
        for model in served:
            for batch in args.batch_sizes:
                ids = np.random.default_rng(1).integers(1, 50000, (batch, _LENGTH)).tolist()
                inputs = tensors(ids, end_id=50256)
                inputs["request_output_len"] = np.full((batch, 1), _LENGTH, np.uint32)
                times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
                for number in range(1 + args.repeats):
                    for engine, client in clients.items():
                        taken = seconds(client, model, inputs)
                        if number:  # the first answer of each warms up
                            times[engine].append(taken)
                rates = [
                    f"{batch * _LENGTH / statistics.median(each):.0f}" if each else "-"
                    for each in times.values()
                ]
                print(f"| {model} | {batch} | {' | '.join(rates)} |", flush=True)


if __name__ == "__main__":
    main()
