"""Tokens/s of NVIDIA's C++ backend and of our engine, side by side through tritonserver.

    python -m benchmarks.peers.fastertransformer.speed --work-dir DIR [--models 350m gptj-6b]

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

from benchmarks.models import write_gptj_6b, write_shards
from benchmarks.peers.fastertransformer.served import ENGINES, Served, Tensors, ask, both, tensors
from export_scripts.families.gpt.layout import GPT, GPTConfig
from inference.server.client import TritonClient

_LENGTH = 128
_GPT_350M = GPTConfig(
    model_name="gpt-350m",
    head_num=16,
    size_per_head=64,
    inter_size=4096,
    num_layer=24,
    vocab_size=50304,
    start_id=50256,
    end_id=50256,
    max_pos_seq_len=1024,
    weight_data_type="fp16",
)


def models(work_dir: Path, names: Sequence[str]) -> dict[str, Served]:
    """Return what is served, in fp16 and, where both engines can, in int8."""
    served = {}
    if "350m" in names:
        folder = work_dir / "350m" / "1-gpu"
        write_shards(GPT, _GPT_350M, folder, "cuda")
        served["350m_fp16"] = Served(folder, "fp16")
        served["350m_int8"] = Served(folder, "fp16", is_int8=True)
    if "gptj-6b" in names:
        folder = work_dir / "gptj-6b" / "1-gpu"
        write_gptj_6b(folder, "cuda")
        served["gptj-6b_fp16"] = Served(folder, "fp16")
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
    parser.add_argument("--models", choices=("350m", "gptj-6b"), nargs="+", default=["350m"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    served = models(args.work_dir.resolve(), args.models)
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
