"""Overhead of serving over decoding, and the gain of continuous batching.

    python -m benchmarks.serve --work-dir DIR [--requests 32] [--concurrency 1 16]

One random model, the same requests two ways: the engine in this process, and a real tritonserver,
each asked one request at a time and with many in flight. Tokens/s counts generated tokens of all
requests. The server and the engine run alternately, under the same conditions.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.models import ROOT, decoder_model

MODEL = "fastertransformer"
ENGINE, SERVER = "engine in process", "through tritonserver"
Ask = Callable[[Sequence[int]], None]
# (way of asking, requests in flight) -> tokens/s of each round
Rates = dict[tuple[str, int], list[float]]


def build_repository(shards: Path, room: Mapping[str, int], args: argparse.Namespace) -> Path:
    """Return a repository with the model, whose weights it links to."""
    folder: Path = args.work_dir / f"repository_{args.model}"
    model_dir = folder / MODEL
    (model_dir / "1").mkdir(parents=True, exist_ok=True)
    link = model_dir / "1" / shards.name
    if not link.exists():
        link.symlink_to(shards.resolve())
    command = [
        *(sys.executable, "-m", "export_scripts.build_repository"),
        *(str(model_dir), "--tensor-model-parallel-size", "1"),
        *("--max-batch-size", "64", "--data-type", args.data_type, "--no-ensemble"),
        *("--overwrite", "--parameter", f"device={args.device}"),
    ]
    for name, value in room.items():
        command += ["--parameter", f"{name}={value}"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return folder


def tensors(ids: Sequence[int], output_len: int) -> dict[str, np.ndarray]:
    """Return one request of one row, without an end token."""
    return {
        "input_ids": np.array([ids], np.uint32),
        "input_lengths": np.array([[len(ids)]], np.uint32),
        "request_output_len": np.array([[output_len]], np.uint32),
        "min_length": np.array([[output_len]], np.int32),
    }


def rate(ask: Ask, prompts: Sequence[Sequence[int]], concurrency: int, output_len: int) -> float:
    """Return tokens/s of all prompts with a number of requests in flight."""
    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(ask, prompts))
    return len(prompts) * output_len / (time.perf_counter() - start)


def measure(
    ways: Mapping[str, Ask], prompts: Sequence[Sequence[int]], args: argparse.Namespace
) -> Rates:
    """Return the rates of server and engine, measured alternately."""
    rates: Rates = {}
    for ask in ways.values():
        ask(prompts[0])
    for concurrency in args.concurrency:
        subset = prompts if concurrency > 1 else prompts[: max(4, len(prompts) // 4)]
        for _ in range(args.repeats):
            for name, ask in ways.items():
                each = rate(ask, subset, concurrency, args.output_len)
                rates.setdefault((name, concurrency), []).append(each)
    return rates


def report(rates: Rates, args: argparse.Namespace) -> None:
    """Print all rates and their ratios."""
    print("| | in flight | tokens/s | min..max |\n|---|---|---|---|")
    middle = {way: statistics.median(each) for way, each in rates.items()}
    for (name, concurrency), each in rates.items():
        rounded = f"{middle[name, concurrency]:.1f} | {min(each):.1f}..{max(each):.1f}"
        print(f"| {name} | {concurrency} | {rounded} |")
    fewest, most = min(args.concurrency), max(args.concurrency)
    added = middle[ENGINE, fewest] / middle[SERVER, fewest] - 1
    print(f"\nthe server adds {added:+.1%} to the engine's time, {fewest} in flight")
    if fewest < most:
        for name in (ENGINE, SERVER):
            gain = middle[name, most] / middle[name, fewest]
            print(f"{name}: {most} in flight give {gain:.1f} times the tokens/s of {fewest}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="keeps the model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=("gpt2", "gptj-6b"), default="gpt2")
    parser.add_argument("--data-type", default="fp32", help="fp32, fp16 or bf16")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    from inference.decoding.request import parse_request
    from inference.engine.engine import Engine, EngineOptions, Placement
    from inference.server.client import TritonClient
    from inference.server.server import TritonServer

    model = decoder_model(args.model, args.work_dir, args.device)
    # Both engines run at once: neither may take all memory.
    room = {"max_lanes": max(args.concurrency), "max_seq_len": args.input_len + args.output_len}
    repository = build_repository(model.ft_dir, room, args)
    shape = (args.requests, args.input_len)
    prompts = np.random.default_rng(1).integers(1, model.vocab_size, shape).tolist()
    with contextlib.ExitStack() as stack:
        options = EngineOptions(**room)
        engine = stack.enter_context(
            Engine(
                model.ft_dir,
                Placement(data_type=args.data_type, device=args.device),
                options=options,
            )
        )
        server = stack.enter_context(
            TritonServer(
                repository,
                http_port=0,
                grpc_port=0,
                metrics_port=0,
                log_path=args.work_dir / "tritonserver.log",
            )
        )
        server.start(timeout_s=300)
        client = stack.enter_context(TritonClient(server.grpc_url))

        def ask_engine(ids: Sequence[int]) -> None:
            engine.generate(parse_request(tensors(ids, args.output_len), engine.limits))

        def ask_server(ids: Sequence[int]) -> None:
            client.infer(MODEL, tensors(ids, args.output_len))

        report(measure({ENGINE: ask_engine, SERVER: ask_server}, prompts, args), args)


if __name__ == "__main__":
    main()
