"""What serving adds to decoding, and what continuous batching gives.

    python -m benchmarks.serve --work-dir DIR [--requests 32] [--concurrency 1 16]

One random GPT-2, the same requests three ways: the engine in this process, and a real tritonserver
asked one request at a time and with many in flight. Tokens/s counts generated tokens of all
requests.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.decode import convert
from benchmarks.models import write_gpt2

ROOT = Path(__file__).resolve().parents[1]
MODEL = "fastertransformer"
Ask = Callable[[Sequence[int]], None]


def build_repository(folder: Path, work_dir: Path) -> Path:
    """Return a repository with the converted model."""
    model_dir = work_dir / "repository" / MODEL
    shards = convert(folder, model_dir / "1")
    command = [
        *(sys.executable, "-m", "export_scripts.build_repository"),
        *(str(model_dir), "--tensor-model-parallel-size", "1"),
        *("--max-batch-size", "64", "--data-type", "fp32", "--no-ensemble"),
    ]
    if not (model_dir / "config.pbtxt").exists():
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return shards


def tensors(ids: Sequence[int], output_len: int) -> dict[str, np.ndarray]:
    """Return one request of one row, which no end token can end early."""
    return {
        "input_ids": np.array([ids], np.uint32),
        "input_lengths": np.array([[len(ids)]], np.uint32),
        "request_output_len": np.array([[output_len]], np.uint32),
        "min_length": np.array([[output_len]], np.int32),
    }


def rate(ask: Ask, prompts: Sequence[Sequence[int]], concurrency: int, output_len: int) -> float:
    """Return tokens/s of all prompts with so many requests in flight."""
    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(ask, prompts))
    return len(prompts) * output_len / (time.perf_counter() - start)


def measure(
    name: str, ask: Ask, prompts: Sequence[Sequence[int]], args: argparse.Namespace
) -> None:
    """Print the rates of one way of asking."""
    ask(prompts[0])
    for concurrency in args.concurrency:
        subset = prompts if concurrency > 1 else prompts[: max(4, len(prompts) // 4)]
        rates = [rate(ask, subset, concurrency, args.output_len) for _ in range(args.repeats)]
        print(
            f"| {name} | {concurrency} | {statistics.median(rates):.1f} "
            f"| {min(rates):.1f}..{max(rates):.1f} |",
            flush=True,
        )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="keeps the model")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    from inference.decoding.request import parse_request
    from inference.serving.client import TritonClient
    from inference.serving.engine import Engine
    from inference.serving.server import TritonServer

    folder = args.work_dir / "gpt2"
    write_gpt2(folder)
    shards = build_repository(folder, args.work_dir)
    shape = (args.requests, args.input_len)
    prompts = np.random.default_rng(1).integers(1, 50000, shape).tolist()
    print("| | in flight | tokens/s | min..max |")
    print("|---|---|---|---|")

    with Engine(shards) as engine:

        def ask_engine(ids: Sequence[int]) -> None:
            engine.generate(parse_request(tensors(ids, args.output_len), engine.limits))

        measure("engine in process", ask_engine, prompts, args)
    server = TritonServer(
        args.work_dir / "repository",
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        log_path=args.work_dir / "tritonserver.log",
    )
    with server:
        server.start(timeout_s=120)
        client = TritonClient(server.grpc_url)

        def ask_server(ids: Sequence[int]) -> None:
            client.infer(MODEL, tensors(ids, args.output_len))

        measure("through tritonserver", ask_server, prompts, args)


if __name__ == "__main__":
    main()
