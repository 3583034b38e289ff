"""OpenAI's protocol with streaming clients: our server, our engine in process, and vLLM's server.

    python -m benchmarks.protocol --work-dir DIR --case llama-8b

Each client sends requests of random token ids one after another. "First token" and "between events"
are times at the client; an event has one token or more. The engine in process answers the same
requests without a protocol, so the difference is the cost of the server. Each contender runs alone
on the machine, and all serve the same weights.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.contenders import Engine, Request, Slipway, random_requests
from benchmarks.models import SIZES, Model, huggingface_folder, random_model
from benchmarks.program import Cell, Options, percentiles, rows_of_process, run
from export_scripts.triton.repository import RepositoryRequest, build_repository
from inference.front.access import OpenAIOptions
from inference.server.openai_server import MODEL_FIELD, PORT_FIELD, OpenAIServer
from inference.server.server import ModelServer
from inference.system.ports import FREE_PORTS
from stages.engines import VLLM_TYPES

_MODEL = "decoder"
_START_LIMIT_S = 600.0
Contender = Callable[[Model, argparse.Namespace], Iterator[tuple[str, str]]]
# Sends a request, and returns the seconds from its start to each of its events.
Send = Callable[[Request], Coroutine[Any, Any, list[float]]]


def tokenizer_folder(work_dir: Path, vocab_size: int) -> Path:
    """Write a byte-level tokenizer of a size, without merges, and return its folder."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"Ġ{number:x}" for number in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = work_dir / f"tokenizer_{vocab_size}"
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@contextlib.asynccontextmanager
async def _http_sender(url: str, more: Mapping[str, Any]) -> AsyncIterator[Send]:
    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limits, raise_for_status=True) as session:

        async def send(request: Request) -> list[float]:
            length = {"max_tokens": request.output_len, **more}
            body = {"model": _MODEL, "prompt": request.prompt, "temperature": 0, "stream": True}
            start = time.perf_counter()
            async with session.post(f"{url}/completions", json=body | length) as response:
                return [
                    time.perf_counter() - start
                    async for line in response.content
                    if line.startswith(b"data: {")
                ]

        yield send


async def _send_in_process(engine: Engine, request: Request) -> list[float]:
    start, done, loop = time.perf_counter(), asyncio.Event(), asyncio.get_running_loop()
    arrivals: dict[int, float] = {}  # tokens so far -> seconds

    def on_tokens(number: int, tokens: int) -> None:
        del number
        arrivals.setdefault(tokens, time.perf_counter() - start)
        if tokens == request.output_len:
            loop.call_soon_threadsafe(done.set)

    engine.submit(0, request, on_tokens)
    await done.wait()
    return list(arrivals.values())


def rows(
    sender: Callable[[], contextlib.AbstractAsyncContextManager[Send]],
    model: Model,
    args: argparse.Namespace,
) -> Iterator[tuple[str, str]]:
    """Yield the rows of one contender."""
    lengths = (args.input_len,) * 2, (args.output_len,) * 2

    async def load(clients: int, seed: int) -> tuple[float, list[list[float]]]:
        count = clients * args.rounds
        vocab_size = model.vocab_size - 300
        requests = random_requests(count, *lengths, vocab_size=vocab_size, seed=seed)
        remaining = iter(requests)  # shared by the clients
        async with sender() as send:

            async def client() -> list[list[float]]:
                return [await send(request) for request in remaining]

            start = time.perf_counter()
            events = await asyncio.gather(*(client() for _ in range(clients)))
            return time.perf_counter() - start, [*chain(*events)]

    for clients in args.clients:
        asyncio.run(load(clients, seed=0))
        seconds, events = asyncio.run(load(clients, seed=clients))
        title, tokens = f"{clients} in flight", args.output_len * len(events)
        yield title, f"{tokens / seconds:.0f} tokens/s"
        yield f"{title}, events", f"{sum(map(len, events)) / tokens:.2f} a token"
        kinds = {
            "first token": [times[0] for times in events],
            "between events": [b - a for times in events for a, b in pairwise(times)],
        }
        for name, values in kinds.items():
            yield from percentiles(f"{title}, {name}", values, (50, 99))


def _through_ours(model: Model, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    repository = args.work_dir / f"streamed_{args.model}"
    request = RepositoryRequest(
        repository / _MODEL,
        tp_size=1,
        pp_size=1,
        max_batch_size=64,
        data_type=args.data_type,
        decoupled=True,
        ensemble=False,
        overwrite=True,
        parameters={"device": args.device, "max_seq_len": str(args.max_seq_len)},
    )
    if not request.weights_dir.exists():
        request.weights_dir.parent.mkdir(parents=True, exist_ok=True)
        request.weights_dir.symlink_to(model.ft_dir)
    build_repository(request)
    options = OpenAIOptions(0, tokenizer_folder(args.work_dir, model.vocab_size))
    log_path = args.work_dir / "server.log"
    with ModelServer(repository, ports=FREE_PORTS, log_path=log_path, openai=options) as server:
        server.start(timeout_s=_START_LIMIT_S)
        url = str(server.openai_url)
        # min_tokens suppresses the end token; unlike vLLM's `ignore_eos`, it does not generate it.
        yield from rows(lambda: _http_sender(url, {"min_tokens": args.output_len}), model, args)


def _through_vllm(model: Model, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    options = {
        "model": MODEL_FIELD,
        "tokenizer": tokenizer_folder(args.work_dir, model.vocab_size),
        "served-model-name": _MODEL,
        "dtype": VLLM_TYPES[args.data_type],
        "max-model-len": args.max_seq_len,
        "port": PORT_FIELD,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    with OpenAIServer(
        [*shlex.split(args.vllm), *flags, "--no-enable-prefix-caching"],
        model=_MODEL,
        host="127.0.0.1",
        ports={"http": 0},
        log_path=args.work_dir / "vllm.log",
        folder=huggingface_folder(model),
    ) as vllm:
        vllm.start(timeout_s=_START_LIMIT_S, progress=lambda _: None)
        url = f"http://{vllm.address('http')}/v1"
        yield from rows(lambda: _http_sender(url, {"ignore_eos": True}), model, args)


def _engine(model: Model, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    names = ("data_type", "device", "max_seq_len")
    engine = Slipway(model, **{name: getattr(args, name) for name in names})
    yield from rows(lambda: contextlib.nullcontext(partial(_send_in_process, engine)), model, args)


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the rows of each contender."""
    contenders: dict[str, Contender] = {
        "slipway": _through_ours,
        "slipway in process": partial(rows_of_process, _engine),
    }
    if args.vllm or importlib.util.find_spec("vllm") is not None:
        args.vllm = args.vllm or f"{sys.executable} -m vllm.entrypoints.openai.api_server"
        contenders = {"vLLM": _through_vllm, **contenders}
    model = random_model(args.model, args.work_dir)
    for name, contender in contenders.items():
        for row, value in contender(model, args):
            yield row, name, value


OPTIONS: Options = {
    "work_dir": {},
    "device": {},
    "model": {"choices": tuple(SIZES), "default": "llama-8b"},
    "data_type": {"default": "fp16"},
    "clients": {"type": int, "nargs": "+", "default": [1, 16, 64, 192]},
    "input_len": {"default": 512},
    "output_len": {"default": 200},
    "rounds": {"type": int, "default": 3, "help": "requests of each client"},
    "max_seq_len": {},
    "vllm": {"help": "command that starts vLLM's server (default: in this Python)"},
}

if __name__ == "__main__":
    run(measure, __doc__, OPTIONS)
