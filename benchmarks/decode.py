"""Speed of prefill and decoding, against transformers, CTranslate2, vLLM and llama.cpp.

    python -m benchmarks.decode --work-dir DIR [--batch 1 8] [--data-type fp32 int8 bf16]
    python -m benchmarks.decode --work-dir DIR --case cpu-qwen-0.5b --llama-cpp llama-batched-bench
    python -m benchmarks.decode --work-dir DIR --device cuda --model gptj-6b \
        --batch 1 --input-len 128 --output-len 128

In each round every contender generates the same number of tokens for the same random prompts,
greedily and without an end token; the time includes prefill, as for a user. Tokens/s are generated
tokens of the whole batch, or with --output-len 1 those of the prompts. "of bandwidth" is the time
to read a step's weights, keys and values once, at the memory bandwidth measured in the same run,
divided by the median time of a step. On CPU every contender has its own threads, and with more
threads than cores OpenMP makes them sleep at each wait: leave others out (--without) to measure one
program alone. int8 computes in fp32 on CPU and in fp16 on CUDA; llama.cpp's int8 is Q8_0. On CPU,
vLLM takes part if it is installed, llama.cpp if its program `llama-batched-bench` and the package
gguf are.
"""

import argparse
import contextlib
import importlib.util
import itertools
import os
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import packages_distributions, version
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.contenders import (
    Generate,
    Prompts,
    Slipway,
    Vllm,
    ctranslate,
    engine_generator,
    hugging_face,
    llama_cpp,
)
from benchmarks.models import SIZES, Model, random_model
from benchmarks.program import Cell, Options, call, own_process, percentiles, run
from export_scripts.families.layout.architecture import DecoderArchitecture
from export_scripts.ft.config_ini import read_config
from inference.ranks.device import compute_dtype, matrix_dtype
from inference.system.process_memory import memory_variables

_DATA_TYPES = {"cpu": ["fp32", "int8", "bf16"], "cuda": ["fp16", "int8", "bf16"]}
_COMPUTED_WITH_INT8 = {"cpu": "fp32", "cuda": "fp16"}
_PEERS = ("transformers", "CTranslate2", "vLLM", "llama.cpp")
# A pause before each program: OpenMP's threads spin after their work (Intel's, which CTranslate2
# uses, for 0.2 s) and would slow down the next program.
_SETTLE_S = 0.5
_BANDWIDTH_BYTES = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}  # read in each round
_BANDWIDTH_ROUNDS = 7

# The seconds of a round, and the seconds between its tokens.
Times = tuple[float, list[float]]


class Program(NamedTuple):
    """A contender, which runs in its own process.

    In one process, the contenders' threads would outnumber the processors, OpenMP would make them
    sleep at each wait, and every program would take up to twice as long.

    Attributes:
        make: loads the model.
        step_bytes: (sequences, cached tokens of each) -> bytes that a step reads.
    """

    name: str
    make: Callable[[], Generate]
    step_bytes: Callable[[int, int], int] | None = None


def programs(model: Model, args: argparse.Namespace) -> Iterator[Program]:
    """Yield every program, for every type it supports."""
    longest = max(args.input_len) + args.output_len
    for kind in args.data_type or _DATA_TYPES[args.device]:
        int8 = kind == "int8"
        data_type = _COMPUTED_WITH_INT8[args.device] if int8 else kind
        ours = partial(
            engine_generator,
            Slipway,
            model,
            data_type=data_type,
            int8_mode=int(int8),
            device=args.device,
            max_lanes=max(args.batch),
            max_seq_len=longest,
            share_prefixes=False,  # each round must compute its prompts
        )
        read = partial(step_bytes, model.ft_dir, data_type, args.device, int8)
        yield Program(f"slipway {kind}", ours, read)
        for peer, make in _peers(model, kind, longest, args).items():
            if peer not in args.without:
                yield Program(f"{peer} {_version(peer)} {kind}".replace("  ", " "), make)


def _peers(
    model: Model, kind: str, longest: int, args: argparse.Namespace
) -> dict[str, Callable[[], Generate]]:
    """Return the other installed programs that support a type."""
    found: dict[str, Callable[[], Generate]] = {}
    if kind != "int8":
        found["transformers"] = partial(hugging_face, model, data_type=kind, device=args.device)
    if args.device != "cpu":
        return found
    threads = {"threads": args.threads}
    if kind in ("fp32", "int8"):
        found["CTranslate2"] = partial(ctranslate, model, data_type=kind, **threads)
    if kind != "int8" and importlib.util.find_spec("vllm") is not None:
        found["vLLM"] = partial(
            engine_generator,
            Vllm,
            model,
            data_type=kind,
            max_model_len=longest,
            enable_prefix_caching=False,
        )
    if args.llama_cpp is not None:
        found["llama.cpp"] = partial(
            llama_cpp, model, data_type=kind, program=args.llama_cpp, **threads
        )
    return found


def _version(peer: str) -> str:
    if peer == "llama.cpp":
        return ""
    # The distribution of vLLM's CPU build has another name than its module.
    return version(packages_distributions()[peer.lower()][0])


def _measured(generate: Generate, prompts: Prompts, output_len: int) -> Times:
    arrivals: dict[int, float] = {}  # number of a token -> time
    start = time.perf_counter()
    measured = generate(prompts, output_len, lambda n: arrivals.setdefault(n, time.perf_counter()))
    seconds = time.perf_counter() - start if measured is None else measured
    return seconds, [b - a for a, b in itertools.pairwise(arrivals.values())]


def rounds(
    processes: Sequence[ProcessPoolExecutor], prompts: Prompts, args: argparse.Namespace
) -> list[list[Times]]:
    """Return the times of every contender, which run in turn, without a warm-up round."""
    times: list[list[Times]] = [[] for _ in processes]
    for _ in range(1 + args.repeats):
        for process, own_times in zip(processes, times, strict=True):
            time.sleep(_SETTLE_S)
            own_times.append(process.submit(call, _measured, prompts, args.output_len).result())
    return [own_times[1:] for own_times in times]


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells of every program for each batch size and prompt length."""
    # Inherited by every contender's process: torch's threads, and a server's memory settings.
    os.environ |= {**memory_variables(), "OMP_NUM_THREADS": str(args.threads)}
    torch.set_num_threads(args.threads)
    model = random_model(args.model, args.work_dir)
    generator = torch.Generator().manual_seed(1)
    ids = model.vocab_size - 300  # in every contender's vocabulary
    table = list(programs(model, args))
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(own_process(each.make)) for each in table]
        for batch, length in itertools.product(args.batch, args.input_len):
            prompts = torch.randint(1, ids, (batch, length), generator=generator).tolist()
            times = rounds(processes, prompts, args)
            title = f"batch {batch}, {length} in, {args.output_len} out"
            tokens = batch * (length if args.output_len == 1 else args.output_len)
            bandwidth = measured_bandwidth(args.device)
            for program, each in zip(table, times, strict=True):
                seconds = [one for one, _ in each]
                steps = list(itertools.chain(*(between for _, between in each)))
                yield title, program.name, f"{tokens / statistics.median(seconds):.1f} tokens/s"
                yield f"{title}, slowest", program.name, f"{tokens / max(seconds):.1f} tokens/s"
                if len(steps) > 1:
                    for row, value in percentiles(f"{title}, a step", steps, (50, 99)):
                        yield row, program.name, value
                if program.step_bytes is not None and steps:
                    least = program.step_bytes(batch, length + args.output_len // 2) / bandwidth
                    share = least / statistics.median(steps)
                    yield f"{title}, of bandwidth", program.name, f"{share * 100:.0f} %"


def measured_bandwidth(device: str) -> float:
    """Return the best rate of reading memory with torch's threads, in bytes/s."""
    values = torch.ones(_BANDWIDTH_BYTES[device] // 4, device=device)

    def read() -> None:
        # torch's fastest reductions
        if device == "cpu":
            torch.dot(values, values)
        else:
            values.sum()
            torch.cuda.synchronize()

    read()
    return values.nbytes / min(timeit.repeat(read, number=1, repeat=_BANDWIDTH_ROUNDS))


def step_bytes(
    ft_dir: Path, data_type: str, device: str, int8: bool, batch: int, length: int
) -> int:
    """Return the bytes of weights, keys and values that one decoding step of a decoder reads.

    Each of `batch` sequences has `length` cached tokens.
    """
    family, config = read_config(ft_dir)
    architecture = config.architecture()
    assert isinstance(architecture, DecoderArchitecture)
    computed = compute_dtype(data_type, torch.device(device))
    stored = matrix_dtype(data_type, config.weight_data_type, torch.device(device)) or computed
    matrix_bytes = 1 if int8 else stored.itemsize
    # A step reads one row of the embedding for each token, unless the table is also the head.
    unread = {"model.wpe", "model.wte" if architecture.untied_head else ""}
    weights = sum(
        prod(tensor.shape) * (matrix_bytes if len(tensor.shape) > 1 else computed.itemsize)
        for tensor in family.tensors(config)
        if tensor.name not in unread
    )
    head_bytes = architecture.kv_head_num * architecture.size_per_head * computed.itemsize
    return weights + batch * length * 2 * architecture.num_layer * head_bytes


OPTIONS: Options = {
    "work_dir": {},
    "device": {},
    "batch": {},
    "output_len": {},
    "repeats": {},
    "threads": {},
    "model": {"choices": tuple(SIZES), "default": "gpt2"},
    "input_len": {"nargs": "+", "default": [32]},
    "data_type": {"nargs": "+", "choices": ("fp32", "fp16", "bf16", "int8")},
    "llama_cpp": {"type": Path, "metavar": "PROGRAM", "help": "llama.cpp's llama-batched-bench"},
    "without": {"nargs": "*", "choices": _PEERS, "default": [], "help": "peers to leave out"},
}

if __name__ == "__main__":
    run(measure, __doc__, OPTIONS)
