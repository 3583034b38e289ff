"""Throughput of simultaneous requests and of random arrivals, compared with vLLM.

    python -m benchmarks.throughput --work-dir DIR --case chats-fp8
    python -m benchmarks.throughput --work-dir DIR --device cuda --model gptj-6b --arrivals 0.5 0.8

The model has random weights of the named size. Requests are greedy unless --top-p is given, and
stop only at their length. "batch N" is N requests of equal length at once; "first token" is the
time until all of them have one token; "mixed" is requests of --mixed-in tokens in and --mixed-out
out, the first time after the start and again; --long sends long prompts at once, --prompt a single
one. The requests of --shared have a common prefix; with it, prefix caching is on.

Arrivals are the mixed requests at random times, at the given shares of the rate at which they were
answered at once. vLLM takes part if it can be imported: it runs first, in its own process, and both
then get shares of vLLM's rate. It serves the same weights: its own dummy weights are so small that
most activations are zero in fp16, and products of zeros take a tenth less time.
"""

import argparse
import importlib.util
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

from benchmarks.contenders import Engine, Request, Slipway, Vllm, random_requests
from benchmarks.models import SIZES, Model, in_fp8, random_model
from benchmarks.program import Cell, Options, percentiles, rows_of_process, run

_RATE = "mixed, again, rate"
_VLLM = "vLLM"


def timed(engine: Engine, requests: Sequence[Request]) -> float:
    """Send all requests at once, and return the seconds until all are answered."""
    start = time.perf_counter()
    for number, request in enumerate(requests):
        engine.submit(number, request, None)
    engine.wait()
    return time.perf_counter() - start


def arriving(
    engine: Engine, requests: Sequence[Request], rate: float
) -> Iterator[tuple[str, list[float]]]:
    """Send requests at random times, `rate` per second; yield the latencies of their tokens."""
    arrivals: list[list[float]] = [[] for _ in requests]
    counts = [0] * len(requests)

    def on_tokens(number: int, tokens: int) -> None:
        if tokens > counts[number]:
            counts[number] = tokens
            arrivals[number].append(time.perf_counter())

    rng = random.Random(11)  # independent arrivals: a Poisson process
    times = list(accumulate(rng.expovariate(rate) for _ in requests))
    start = time.perf_counter()

    def send() -> None:
        for number, (at, request) in enumerate(zip(times, requests, strict=True)):
            time.sleep(max(start + at - time.perf_counter(), 0))
            engine.submit(number, request, on_tokens)

    sender = threading.Thread(target=send)
    sender.start()
    while sender.is_alive():
        engine.wait()
        time.sleep(1e-4)
    sender.join()
    engine.wait()
    pairs = zip(times, arrivals, strict=True)
    yield "first token", [tokens[0] - start - at for at, tokens in pairs]
    yield "between tokens", [b - a for tokens in arrivals for a, b in pairwise(tokens)]


def rows(engine: Engine, model: Model, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield every row of the table as soon as it is measured."""
    # Only ids that every contender's vocabulary has.
    make = partial(random_requests, vocab_size=model.vocab_size - 300)
    mixed = make(args.requests, args.mixed_in, args.mixed_out)
    tokens = sum(request.output_len for request in mixed)
    rate = args.rate
    if args.requests:
        for turn in ("first time", "again"):
            seconds = timed(engine, mixed)
            yield f"mixed, {turn}", f"{tokens / seconds:.0f} tokens/s"
        yield _RATE, f"{len(mixed) / seconds:.1f} requests/s"
        rate = rate or len(mixed) / seconds
    for batch in args.batch:
        lengths = ((1, 1), (args.output_len,) * 2)
        one, full = (make(batch, (args.input_len,) * 2, each, seed=batch) for each in lengths)
        timed(engine, one)
        pairs = [(timed(engine, one), timed(engine, full)) for _ in range(args.repeats)]
        first, total = (statistics.median(values) for values in zip(*pairs, strict=True))
        step = (total - first) / (args.output_len - 1)
        yield f"batch {batch}", f"{batch * args.output_len / total:.0f} tokens/s"
        yield f"batch {batch}, first token", f"{first * 1e3:.1f} ms"
        yield f"batch {batch}, a step", f"{step * 1e3:.3f} ms"

    def median_after_warmup(requests: Sequence[Request]) -> float:
        timed(engine, requests)
        return statistics.median(timed(engine, requests) for _ in range(args.repeats))

    if args.long:
        long = make(args.long, args.long_in, args.long_out)
        tokens = sum(len(request.prompt) for request in long)
        seconds = median_after_warmup(long)
        yield f"{args.long} long prompts", f"{tokens / seconds:.0f} prompt tokens/s"
    for length in args.prompt:
        seconds = median_after_warmup(make(1, (length, length), (1, 1)))
        yield f"a prompt of {length}", f"{seconds * 1e3:.1f} ms"
    if args.shared:
        prefix = {"shared_len": args.shared_len}
        lengths = ((args.input_len,) * 2, (args.output_len,) * 2)
        timed(engine, make(args.shared, *lengths, **prefix, seed=1))  # warm-up, another prefix
        seconds = timed(engine, make(args.shared, *lengths, **prefix))
        row = f"{args.shared} requests that share {args.shared_len} tokens"
        yield row, f"{args.shared * args.output_len / seconds:.0f} tokens/s"
    for share in args.arrivals:
        title = f"{share:.0%} of the mixed requests' rate"
        yield title, f"{share * rate:.1f} requests/s"
        for name, values in arriving(engine, mixed, share * rate):
            yield from percentiles(f"{title}, {name}", values, (50, 95, 99))


def _started(name: str, model: Model, args: argparse.Namespace) -> Engine:
    if name == _VLLM:
        return Vllm(
            model,
            data_type=args.data_type,
            top_p=args.top_p,
            max_model_len=args.max_seq_len,
            tensor_parallel_size=args.tp,
            enable_prefix_caching=bool(args.shared),
            quantization="fp8" if args.fp8 and args.fp8_folder is None else None,
            kv_cache_dtype="fp8" if args.fp8_cache else "auto",
        )
    return Slipway(
        model,
        top_p=args.top_p,
        max_seq_len=args.max_seq_len,
        max_lanes=args.max_sequences,
        share_prefixes=bool(args.shared),  # off otherwise: repeated prompts must be computed
        data_type=args.data_type,
        int8_mode=int(args.int8),
        fp8=args.fp8 or args.fp8_folder is not None,
        kv_cache_dtype="fp8_e4m3" if args.fp8_cache else "auto",
        batch_invariant=args.batch_invariant,
        device=args.device,
        tp_size=args.tp,
    )


def _contend(name: str, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Start a contender, which stops with its process, and yield its rows."""
    model = random_model(args.model, args.work_dir, tp_size=args.tp)
    if args.fp8_folder is not None:
        model = in_fp8(model, args.fp8_folder, tp_size=args.tp)
    start = time.perf_counter()
    engine = _started(name, model, args)
    yield "ready after", f"{time.perf_counter() - start:.0f} s"
    yield from rows(engine, model, args)


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the rows of each contender, which has a process of its own."""
    if args.arrivals and not args.requests:
        raise SystemExit("--arrivals sends the mixed requests, of which --requests 0 makes none")
    has_vllm = not args.no_vllm and importlib.util.find_spec("vllm") is not None
    for name in (_VLLM, "slipway") if has_vllm else ("slipway",):
        for row, value in rows_of_process(_contend, name, args):
            if row == _RATE:
                args.rate = args.rate or float(value.split()[0])
            yield row, name, value


_SWITCH, _COUNT = {"action": "store_true"}, {"type": int, "default": 0}
_SPAN = {"type": int, "nargs": 2}
OPTIONS: Options = {
    "work_dir": {},
    "device": {},
    "tp": {},
    "max_seq_len": {},
    "data_type": {"default": "fp16"},
    "int8": {**_SWITCH, "help": "int8 matrices, only in our engine"},
    "fp8": {**_SWITCH, "help": "products in FP8, with weights rounded at load time"},
    "fp8_folder": {"choices": ("block", "channel"), "help": "scales of a folder of FP8 matrices"},
    "fp8_cache": {**_SWITCH, "help": "keys and values in FP8"},
    "batch_invariant": {**_SWITCH, "help": "only in our engine"},
    "top_p": {"type": float, "help": "nucleus to sample from (default: greedy)"},
    "model": {"choices": tuple(SIZES), "default": "gpt2"},
    "batch": {"nargs": "*", "default": [1, 8, 32, 64]},
    "input_len": {"default": 128},
    "output_len": {"default": 128},
    "requests": {**_COUNT, "default": 256, "help": "number of mixed requests"},
    "mixed_in": {**_SPAN, "default": [32, 512]},
    "mixed_out": {**_SPAN, "default": [16, 256]},
    "long": {**_COUNT, "help": "requests with long prompts at once"},
    "long_in": {**_SPAN, "default": [2000, 6000]},
    "long_out": {**_SPAN, "default": [32, 128]},
    "prompt": {"type": int, "nargs": "*", "default": [], "help": "lengths of single prompts"},
    "shared": {**_COUNT, "help": "requests with a common prefix"},
    "shared_len": {**_COUNT, "default": 1537, "help": "tokens of the common prefix"},
    "arrivals": {"type": float, "nargs": "*", "default": [], "help": "shares of --rate"},
    "rate": {"type": float, "help": "requests/s (default: the rate of the mixed requests)"},
    "max_sequences": {"type": int, "help": "sequences at once, only in our engine"},
    "repeats": {"default": 3},
    "no_vllm": _SWITCH,
}

if __name__ == "__main__":
    run(measure, __doc__, OPTIONS)
