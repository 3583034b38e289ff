"""Throughput of many requests at once, and of requests that arrive at random, next to vLLM's.

    python -m benchmarks.throughput --work-dir DIR --case chats-fp8
    python -m benchmarks.throughput --work-dir DIR --device cuda --model gptj-6b --arrivals 0.5 0.8

The model has random weights of the named size. Requests are greedy, unless --top-p is given, and
stop at their length alone. "batch N" is N requests of equal length at once; "first token" is the
time until all of them have one token; "mixed" is requests of --mixed-in tokens in and --mixed-out
out, the first time after the start and again; --long sends long prompts at once and --prompt one
alone. With --shared, whose requests have one beginning, prompts that are sent again are found in
the cache.

Arrivals are the mixed requests at random times, at the given shares of the rate at which they were
answered at once. vLLM takes part where it can be imported, first, in a process of its own; both
then get shares of vLLM's rate. It serves the same weights: its own dummy ones are so small that
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
    """Return the seconds until all requests, sent at once, are answered."""
    began = time.perf_counter()
    for number, request in enumerate(requests):
        engine.submit(number, request, None)
    engine.wait()
    return time.perf_counter() - began


def arriving(
    engine: Engine, requests: Sequence[Request], rate: float
) -> Iterator[tuple[str, list[float]]]:
    """Send requests at random times, `rate` per second; yield the seconds of their tokens."""
    seen: list[list[float]] = [[] for _ in requests]
    counts = [0] * len(requests)

    def note(number: int, tokens: int) -> None:
        if tokens > counts[number]:
            counts[number] = tokens
            seen[number].append(time.perf_counter())

    draw = random.Random(11)  # arrivals are independent
    times = list(accumulate(draw.expovariate(rate) for _ in requests))
    began = time.perf_counter()

    def send() -> None:
        for number, (at, request) in enumerate(zip(times, requests, strict=True)):
            time.sleep(max(began + at - time.perf_counter(), 0))
            engine.submit(number, request, note)

    sender = threading.Thread(target=send)
    sender.start()
    while sender.is_alive():
        engine.wait()
        time.sleep(1e-4)
    sender.join()
    engine.wait()
    pairs = zip(times, seen, strict=True)
    yield "first token", [moments[0] - began - at for at, moments in pairs]
    yield "between tokens", [b - a for moments in seen for a, b in pairwise(moments)]


def rows(engine: Engine, model: Model, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield every row of the table as soon as it is measured."""
    # Ids that every contender's vocabulary has.
    draw = partial(random_requests, vocab_size=model.vocab_size - 300)
    mixed = draw(args.requests, args.mixed_in, args.mixed_out)
    tokens = sum(request.output_len for request in mixed)
    rate = 0.0
    for turn in ("first time", "again"):
        if args.requests:
            seconds = timed(engine, mixed)
            rate = len(mixed) / seconds
            yield f"mixed, {turn}", f"{tokens / seconds:.0f} tokens/s"
    yield _RATE, f"{rate:.1f} requests/s"
    rate = args.rate or rate
    for batch in args.batch:
        lengths = ((1, 1), (args.output_len,) * 2)
        one, whole = (draw(batch, (args.input_len,) * 2, each, seed=batch) for each in lengths)
        timed(engine, one)
        pairs = [(timed(engine, one), timed(engine, whole)) for _ in range(args.repeats)]
        first, total = (statistics.median(values) for values in zip(*pairs, strict=True))
        step = (total - first) / (args.output_len - 1)
        yield f"batch {batch}", f"{batch * args.output_len / total:.0f} tokens/s"
        yield f"batch {batch}, first token", f"{first * 1e3:.1f} ms"
        yield f"batch {batch}, a step", f"{step * 1e3:.3f} ms"

    def settled(requests: Sequence[Request]) -> float:
        timed(engine, requests)
        return statistics.median(timed(engine, requests) for _ in range(args.repeats))

    if args.long:
        long = draw(args.long, args.long_in, args.long_out)
        tokens = sum(len(request.prompt) for request in long)
        yield f"{args.long} long prompts", f"{tokens / settled(long):.0f} prompt tokens/s"
    for length in args.prompt:
        seconds = settled(draw(1, (length, length), (1, 1)))
        yield f"a prompt of {length}", f"{seconds * 1e3:.1f} ms"
    if args.shared:
        beginning = {"shared_len": args.shared_len}
        lengths = ((args.input_len,) * 2, (args.output_len,) * 2)
        timed(engine, draw(args.shared, *lengths, **beginning, seed=1))  # another beginning
        seconds = timed(engine, draw(args.shared, *lengths, **beginning))
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
        share_prefixes=bool(args.shared),  # else sent again, to be computed again
        data_type=args.data_type,
        int8_mode=int(args.int8),
        fp8=args.fp8 or args.fp8_folder is not None,
        kv_cache_dtype="fp8_e4m3" if args.fp8_cache else "auto",
        batch_invariant=args.batch_invariant,
        device=args.device,
        tp_size=args.tp,
    )


def _contend(name: str, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Start a contender, which ends with its process, and yield its rows."""
    model = random_model(args.model, args.work_dir, tp_size=args.tp)
    if args.fp8_folder is not None:
        model = in_fp8(model, args.fp8_folder, tp_size=args.tp)
    began = time.perf_counter()
    engine = _started(name, model, args)
    yield "ready after", f"{time.perf_counter() - began:.0f} s"
    yield from rows(engine, model, args)


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the rows of each contender, which has a process of its own."""
    if args.arrivals and not args.requests:
        raise SystemExit("--arrivals: they are the mixed requests; --requests 0 sends none")
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
    "int8": {**_SWITCH, "help": "matrices in 8 bits, ours alone"},
    "fp8": {**_SWITCH, "help": "products in FP8, the weights rounded as they are loaded"},
    "fp8_folder": {"choices": ("block", "channel"), "help": "of matrices in FP8 with such scales"},
    "fp8_cache": {**_SWITCH, "help": "keys and values in FP8"},
    "batch_invariant": {**_SWITCH, "help": "ours alone"},
    "top_p": {"type": float, "help": "sample from this nucleus, else greedy"},
    "model": {"choices": tuple(SIZES), "default": "gpt2"},
    "batch": {"nargs": "*", "default": [1, 8, 32, 64]},
    "input_len": {"default": 128},
    "output_len": {"default": 128},
    "requests": {**_COUNT, "default": 256, "help": "mixed ones"},
    "mixed_in": {**_SPAN, "default": [32, 512]},
    "mixed_out": {**_SPAN, "default": [16, 256]},
    "long": {**_COUNT, "help": "requests with long prompts at once"},
    "long_in": {**_SPAN, "default": [2000, 6000]},
    "long_out": {**_SPAN, "default": [32, 128]},
    "prompt": {"type": int, "nargs": "*", "default": [], "help": "lengths, one at a time"},
    "shared": {**_COUNT, "help": "requests with one beginning"},
    "shared_len": {**_COUNT, "default": 1537, "help": "tokens of the beginning"},
    "arrivals": {"type": float, "nargs": "*", "default": [], "help": "shares of the rate"},
    "rate": {"type": float, "help": "requests/s that --arrivals are shares of"},
    "max_sequences": {"type": int, "help": "at once, ours alone"},
    "repeats": {"default": 3},
    "no_vllm": _SWITCH,
}

if __name__ == "__main__":
    run(measure, __doc__, OPTIONS)
