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
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.models import SIZES, decoder_model
from benchmarks.program import Cell, run
from benchmarks.served import OURS, Served, build, server, tensors
from inference.decoding.request import parse_request
from inference.engine.engine import Engine, EngineOptions, Placement
from inference.server.client import TritonClient

MODEL = "fastertransformer"
Ask = Callable[[Sequence[int]], None]


def rate(ask: Ask, prompts: Sequence[Sequence[int]], concurrency: int, output_len: int) -> float:
    """Return tokens/s of all prompts with a number of requests in flight."""
    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(ask, prompts))
    return len(prompts) * output_len / (time.perf_counter() - start)


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the rates of server and engine, measured alternately."""
    model = decoder_model(args.model, args.work_dir)
    # Both engines run at once: neither may take all memory.
    room = {"max_lanes": max(args.concurrency), "max_seq_len": args.input_len + args.output_len}
    parameters = {"device": args.device} | {name: str(value) for name, value in room.items()}
    served = Served(model.ft_dir, args.data_type, {"parameters": parameters})
    repository = build(args.work_dir / f"repository_{args.model}", OURS, {MODEL: served})
    shape = (args.requests, args.input_len)
    prompts = np.random.default_rng(1).integers(1, model.vocab_size, shape).tolist()
    placement = Placement(data_type=args.data_type, device=args.device)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine(model.ft_dir, placement, options=EngineOptions(**room)))
        triton = stack.enter_context(server(repository, args.work_dir / "tritonserver.log"))
        triton.start(timeout_s=300)
        client = stack.enter_context(TritonClient(triton.address("grpc")))
        lengths = {"request_output_len": args.output_len, "min_length": args.output_len}

        def ask_engine(ids: Sequence[int]) -> None:
            engine.generate(parse_request(tensors([ids], **lengths), engine.limits))

        def ask_server(ids: Sequence[int]) -> None:
            client.infer(MODEL, tensors([ids], **lengths))

        ways = {"engine in process": ask_engine, "through tritonserver": ask_server}
        for ask in ways.values():
            ask(prompts[0])
        for concurrency in args.concurrency:
            asked = prompts if concurrency > 1 else prompts[: max(4, len(prompts) // 4)]
            rates: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(args.repeats):
                for name, ask in ways.items():
                    rates[name].append(rate(ask, asked, concurrency, args.output_len))
            for name, each in rates.items():
                yield f"{concurrency} in flight", name, f"{statistics.median(each):.1f} tokens/s"
                yield f"{concurrency} in flight, slowest", name, f"{min(each):.1f} tokens/s"


if __name__ == "__main__":
    run(
        measure,
        __doc__,
        common=("work_dir", "device", "input_len", "output_len"),
        model={"choices": ("gpt2", *SIZES), "default": "gpt2"},
        data_type={"default": "fp32"},
        requests={"type": int, "default": 32},
        concurrency={"type": int, "nargs": "+", "default": [1, 16]},
        repeats={"default": 3},
    )
