"""Throughput of many requests at once, and of requests that arrive at random, next to vLLM's.

    python -m benchmarks.throughput --work-dir DIR --device cuda --model gptj-6b
    python -m benchmarks.throughput --work-dir DIR --device cuda --family gpt --hidden 1024 \
        --layers 24 --heads 16 --arrivals 0.5 0.8 0.95

The model has random weights of the named size, or of the given sizes, which allows sizing a machine
before a checkpoint exists. Requests are greedy, unless --top-p is given, and stop at their length
alone. "batch N" is N requests of equal length at once; "first token" is the time until all of them
have one token; "mixed" is requests of --mixed-in tokens in and --mixed-out out, the first time
after the start and again; --long sends long prompts at once and --prompt one alone. With --shared,
whose requests have one beginning, prompts that are sent again are found in the cache.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate, pairwise
from queue import SimpleQueue
from typing import Any

from benchmarks.models import SIZES, Model, Size, huggingface_folder, sized_model
from benchmarks.program import Cell, percentile, rows_of_process, run
from stages.engines import VLLM_TYPES

_RATE = "mixed, again, rate"
# Receives (number of the request, tokens that it has by now).
OnTokens = Callable[[int, int], object]


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens are wanted; no end token stops it earlier."""

    prompt: list[int]
    output_len: int


def random_requests(
    count: int,
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    vocab_size: int,
    shared_len: int = 0,
    seed: int = 7,
) -> list[Request]:
    """Return requests whose tokens in and out lie between two numbers each.

    Each begins with the same `shared_len` tokens, which are not counted among those of `inputs`.
    """
    draw = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [draw.randrange(1, vocab_size) for _ in range(length)]

    shared = ids(shared_len)
    return [
        Request(shared + ids(draw.randint(*inputs)), draw.randint(*outputs)) for _ in range(count)
    ]


class Slipway:
    """This project's engine in this process."""

    def __init__(self, model: Model, *, top_p: float | None = None, **given: Any) -> None:
        """Start the engine; `given` are fields of its placement and of its options."""
        from inference.engine.engine import Engine
        from inference.engine.options import EngineOptions
        from inference.ranks.settings import Placement
        from inference.system.process_memory import keep_loaded

        names = {each.name for each in fields(EngineOptions)}
        options = EngineOptions(**{key: given.pop(key) for key in names & given.keys()})
        placement = Placement(**given)
        self._engine = Engine(model.ft_dir, placement, options=options)
        self._engine.start()
        keep_loaded()
        self._top_p = top_p
        self._futures: list[Any] = []

    def submit(self, number: int, request: Request, on_tokens: OnTokens | None) -> None:
        """Send a request, which is answered meanwhile; its seed is its number."""
        from inference.decoding.options import RowOptions
        from inference.decoding.rows import GenerationRequest, RowRequest

        never = self._engine.limits.vocab_size + 1
        ids = tuple(request.prompt)
        sampling: dict[str, Any] = {} if self._top_p is None else {"top_k": 0, "top_p": self._top_p}
        options = RowOptions(end_id=never, random_seed=number, **sampling)
        row = RowRequest(ids, request.output_len, options, context_ids=ids)
        listener = None
        if on_tokens is not None:

            def listener(step: Any) -> None:
                row = step.rows[0]
                if row is not None:
                    on_tokens(number, len(row.output_ids[0]))

        future = self._engine.submit(GenerationRequest((row,), len(ids)), on_step=listener)
        if on_tokens is not None:
            future.add_done_callback(lambda _: on_tokens(number, request.output_len))
        self._futures.append(future)

    def wait(self) -> None:
        """Wait for the answers to all requests so far."""
        waiting, self._futures = self._futures, []
        for future in waiting:
            future.result()


def _slipway(model: Model, args: argparse.Namespace) -> Slipway:
    return Slipway(
        model,
        top_p=args.top_p,
        max_seq_len=args.max_seq_len,
        max_lanes=args.max_sequences,
        share_prefixes=bool(args.shared),  # else sent again, to be computed again
        data_type=args.data_type,
        int8_mode=int(args.int8),
        fp8=args.fp8,
        batch_invariant=args.batch_invariant,
        device=args.device,
        tp_size=args.tp,
    )


class _Vllm:
    """vLLM in this process."""

    def __init__(self, model: Model, args: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams

        llm = LLM(
            model=str(huggingface_folder(model)),
            skip_tokenizer_init=True,
            dtype=VLLM_TYPES[args.data_type],
            max_model_len=args.max_seq_len,
            tensor_parallel_size=args.tp,
            enable_prefix_caching=bool(args.shared),
            quantization="fp8" if args.fp8 else None,
        )
        choice = {"temperature": 0} if args.top_p is None else {"top_p": args.top_p}
        self._params = partial(SamplingParams, ignore_eos=True, detokenize=False, **choice)
        self._engine = llm.llm_engine
        self._arrived: SimpleQueue[tuple[int, Request, OnTokens | None]] = SimpleQueue()
        self._listeners: dict[str, tuple[int, OnTokens | None]] = {}

    def submit(self, number: int, request: Request, on_tokens: OnTokens | None) -> None:
        self._arrived.put((number, request, on_tokens))

    def wait(self) -> None:
        while self._listeners or not self._arrived.empty():
            # A lock around each step would be taken again before a waiting sender gets it.
            while not self._arrived.empty():
                number, request, on_tokens = self._arrived.get()
                name = f"{number}-{time.perf_counter_ns()}"
                self._listeners[name] = (number, on_tokens)
                params = self._params(max_tokens=request.output_len)
                self._engine.add_request(name, {"prompt_token_ids": request.prompt}, params)
            for output in self._engine.step():
                number, listener = self._listeners[output.request_id]
                if listener is not None:
                    listener(number, len(output.outputs[0].token_ids))
                if output.finished:
                    del self._listeners[output.request_id]


# `submit` begins to answer a request before the next step; `wait` returns once all requests are
# answered, while others may be submitted.
Server = Slipway | _Vllm


def timed(server: Server, requests: Sequence[Request]) -> float:
    """Return the seconds until all requests, sent at once, are answered."""
    began = time.perf_counter()
    for number, request in enumerate(requests):
        server.submit(number, request, None)
    server.wait()
    return time.perf_counter() - began


def arriving(
    server: Server, requests: Sequence[Request], rate: float
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
            server.submit(number, request, note)

    sender = threading.Thread(target=send)
    sender.start()
    while sender.is_alive():
        server.wait()
        time.sleep(1e-4)
    sender.join()
    server.wait()
    pairs = zip(times, seen, strict=True)
    yield "first token", [moments[0] - began - at for at, moments in pairs]
    yield "between tokens", [b - a for moments in seen for a, b in pairwise(moments)]


def rows(server: Server, model: Model, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield every row of the table as soon as it is measured."""
    # Ids that every contender's vocabulary has.
    draw = partial(random_requests, vocab_size=model.vocab_size - 300)
    mixed = draw(args.requests, args.mixed_in, args.mixed_out)
    tokens = sum(request.output_len for request in mixed)
    rate = 0.0
    for turn in ("first time", "again"):
        if args.requests:
            seconds = timed(server, mixed)
            rate = len(mixed) / seconds
            yield f"mixed, {turn}", f"{tokens / seconds:.0f} tokens/s"
    yield _RATE, f"{rate:.1f} requests/s"
    rate = args.rate or rate
    for batch in args.batch:
        lengths = ((1, 1), (args.output_len,) * 2)
        one, whole = (draw(batch, (args.input_len,) * 2, each, seed=batch) for each in lengths)
        timed(server, one)
        pairs = [(timed(server, one), timed(server, whole)) for _ in range(args.repeats)]
        first, total = (statistics.median(values) for values in zip(*pairs, strict=True))
        step = (total - first) / (args.output_len - 1)
        yield f"batch {batch}", f"{batch * args.output_len / total:.0f} tokens/s"
        yield f"batch {batch}, first token", f"{first * 1e3:.1f} ms"
        yield f"batch {batch}, a step", f"{step * 1e3:.3f} ms"

    def settled(requests: Sequence[Request]) -> float:
        timed(server, requests)
        return statistics.median(timed(server, requests) for _ in range(args.repeats))

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
        timed(server, draw(args.shared, *lengths, **beginning, seed=1))  # another beginning
        seconds = timed(server, draw(args.shared, *lengths, **beginning))
        row = f"{args.shared} requests that share {args.shared_len} tokens"
        yield row, f"{args.shared * args.output_len / seconds:.0f} tokens/s"
    for share in args.arrivals:
        title = f"{share:.0%} of the mixed requests' rate"
        yield title, f"{share * rate:.1f} requests/s"
        for name, values in arriving(server, mixed, share * rate):
            for percent in (50, 95, 99):
                yield f"{title}, {name} p{percent}", f"{percentile(values, percent) * 1e3:.1f} ms"


def _contend(
    make: Callable[[Model, argparse.Namespace], Server], args: argparse.Namespace
) -> Iterator[tuple[str, str]]:
    """Start a contender, which ends with its process, and yield its rows."""
    size = SIZES.get(args.model) or Size(args.family, args.hidden, args.layers, args.heads)
    model = sized_model(size, args.work_dir, tp_size=args.tp)
    began = time.perf_counter()
    server = make(model, args)
    yield "ready after", f"{time.perf_counter() - began:.0f} s"
    yield from rows(server, model, args)


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the rows of each contender, which has a process of its own."""
    if args.arrivals and not args.requests:
        raise SystemExit("--arrivals: they are the mixed requests; --requests 0 sends none")
    contenders: dict[str, Any] = {"slipway": _slipway}
    if not args.no_vllm and importlib.util.find_spec("vllm") is not None:
        contenders = {"vLLM": _Vllm, **contenders}
    for name, make in contenders.items():
        for row, value in rows_of_process(_contend, make, args):
            if row == _RATE:
                args.rate = args.rate or float(value.split()[0])
            yield row, name, value


if __name__ == "__main__":
    switch, count = {"action": "store_true"}, {"type": int, "default": 0}
    span = {"type": int, "nargs": 2}
    run(
        measure,
        __doc__,
        work_dir={},
        device={},
        tp={},
        data_type={"default": "fp16"},
        int8={**switch, "help": "matrices in 8 bits, ours alone"},
        fp8={**switch, "help": "products in FP8, the weights rounded as they are loaded"},
        batch_invariant={**switch, "help": "ours alone"},
        top_p={"type": float, "help": "sample from this nucleus, else greedy"},
        model={"choices": tuple(SIZES), "help": "a size by name"},
        family={"choices": ("gpt", "gptj"), "default": "gpt"},
        hidden={**count, "default": 768},
        layers={**count, "default": 12},
        heads={**count, "default": 12},
        batch={"nargs": "*", "default": [1, 8, 32, 64]},
        input_len={"default": 128},
        output_len={"default": 128},
        requests={**count, "default": 256, "help": "mixed ones"},
        mixed_in={**span, "default": [32, 512]},
        mixed_out={**span, "default": [16, 256]},
        long={**count, "help": "requests with long prompts at once"},
        long_in={**span, "default": [2000, 6000]},
        long_out={**span, "default": [32, 128]},
        prompt={"type": int, "nargs": "*", "default": [], "help": "lengths, one at a time"},
        shared={**count, "help": "requests with one beginning"},
        shared_len={**count, "default": 1537, "help": "tokens of the beginning"},
        arrivals={"type": float, "nargs": "*", "default": [], "help": "shares of the rate"},
        rate={"type": float, "help": "requests/s that --arrivals are shares of"},
        max_seq_len={**count, "default": 1024},
        max_sequences={"type": int, "help": "at once, ours alone"},
        repeats={"default": 3},
        no_vllm=switch,
    )
