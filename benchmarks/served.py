"""Folders of shards behind a tritonserver with our engine, or with NVIDIA's C++ backend."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tritonclient.utils import InferenceServerException

from export_scripts.triton.repository import RepositoryRequest, build_repository
from inference.server.client import TritonClient
from inference.server.log import ServerStartError
from inference.server.server import ModelServer
from inference.system.ports import FREE_PORTS

Tensors = dict[str, np.ndarray[Any, Any]]
Answer = Tensors | str  # the outputs, or the reason for their absence
THEIRS, OURS = ENGINES = ("fastertransformer", "pytorch")
NEW_TOKENS = 24
_START_LIMIT_S = 300.0
_ANSWER_LIMIT_S = 60.0
_OUR_PARAMETERS = {
    # By itself our engine takes what is free of a GPU, which others share here. Room for 32
    # sequences of 256 tokens of a model of 6 billion parameters.
    "kv_cache_bytes": str(4 * 2**30),
    "share_prefixes": "0",  # NVIDIA's computes a prompt again, too
}


class Served(NamedTuple):
    """One model of the repositories: its shards, and further fields of the request."""

    shards: Path
    data_type: str = "fp32"
    more: Mapping[str, Any] = {}
    is_int8: bool = False
    tp_size: int = 1


def build(repository: Path, engine: str, served: Mapping[str, Served]) -> Path:
    """Write an engine's repository, which links to the shards."""
    for name, model in served.items():
        version = repository / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        link = version / f"{model.tp_size}-gpu"
        if not link.exists():
            link.symlink_to(model.shards.resolve())
        request = RepositoryRequest(
            repository / name,
            tp_size=model.tp_size,
            pp_size=1,
            max_batch_size=64,
            data_type=model.data_type,
            engine=engine,
            ensemble=False,
            int8_mode=int(model.is_int8),
            parameters=_OUR_PARAMETERS if engine == OURS else {},
            overwrite=True,
        )
        build_repository(replace(request, **model.more))
    return repository


@contextlib.contextmanager
def both(work_dir: Path, served: Mapping[str, Served]) -> Iterator[dict[str, TritonClient]]:
    """Serve models by both engines and yield a client of each server that started.

    The reason of one that did not start is printed; the other still answers.
    """
    with contextlib.ExitStack() as stack:

        def start(engine: str) -> TritonClient | None:
            repository, log_path = work_dir / engine, work_dir / f"{engine}.log"
            build(repository, engine, served)
            server = ModelServer(
                repository,
                ports=FREE_PORTS,
                log_path=log_path,
                has_triton=engine == THEIRS,
                is_nvidias=engine == THEIRS,
            )
            stack.enter_context(server)
            try:
                server.start(timeout_s=_START_LIMIT_S)
            except ServerStartError as error:
                print(f"{engine}: {error}", flush=True)
                return None
            return TritonClient(server.address("grpc"), timeout_s=_ANSWER_LIMIT_S)

        with ThreadPoolExecutor() as pool:
            clients = dict(zip(ENGINES, pool.map(start, ENGINES), strict=True))
        yield {name: stack.enter_context(each) for name, each in clients.items() if each}


def tensors(prompts: Sequence[Sequence[int]], **options: Any) -> Tensors:
    """Return a decoder's request; numbers among `options` go to every row."""
    rows, width = len(prompts), max(map(len, prompts))
    ids = np.zeros((rows, width), np.uint32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    types = {"random_seed": np.uint64, "min_length": np.int32}
    kinds = {bool: bool, float: np.float32, int: np.uint32}
    for name, value in ({"request_output_len": NEW_TOKENS} | options).items():
        if not isinstance(value, np.ndarray):
            kind = types.get(name, kinds[type(value)])
            options[name] = np.full((rows, 1), value, kind)
    lengths = np.array([[len(prompt)] for prompt in prompts], np.uint32)
    return {"input_ids": ids, "input_lengths": lengths, **options}


def attempt(question: Callable[[], Tensors]) -> Answer:
    """Return what a question gives, or the first line of the server's refusal."""
    try:
        return question()
    except (InferenceServerException, ValueError) as error:  # ValueError: not the shape it says
        return str(error).splitlines()[0][:160]
