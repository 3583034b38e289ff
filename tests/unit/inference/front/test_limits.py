"""The table of limits in SECURITY.md: each is tried at its value and one above it."""

import asyncio
import json
import re
import zlib
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from inference.front import (
    guard,
    infer_messages,
    strict_json,
    validation,
    workers,
)
from inference.front.grpc_server import MAX_METADATA_BYTES, SERVER_OPTIONS
from inference.front.guard import IDLE_S, RejectedError, decompressed
from inference.front.openai import requests
from inference.front.openai.prepare import ModelFacts, prepare_generation
from inference.front.openai.requests import ChatRequest, CompletionRequest, read_request
from tests.conftest import ROOT
from tests.unit.inference.front.openai.fake_backend import INPUTS, LetterTexts

SCORES = {"num_log_probs", "num_prompt_log_probs"}
# 2,048 sequences of 128 tokens with a log probability and its token's are the most scores.
FACTS = {"m": ModelFacts("m", INPUTS | SCORES, max_rows=4, context_len=1 << 20)}
prepared = partial(prepare_generation, CompletionRequest, LetterTexts(), FACTS)


def infer(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    validation.read_infer(data, len(data))


def infer_json(size_bytes: int) -> None:
    data = b'{"inputs":[]}'
    validation.read_infer(data.ljust(size_bytes), size_bytes)


def levels(count: int) -> None:
    strict_json.parse_json(b'{"a":' + b"[" * (count - 1) + b"]" * (count - 1) + b"}")


def tensor(shape: list[int], datatype: str = "BYTES", data: Any = ()) -> dict[str, Any]:
    return {"name": "x", "shape": shape, "datatype": datatype, "data": list(data)}


def message(fields: int) -> None:
    request = service_pb2.ModelInferRequest(model_name="m")
    request.raw_input_contents.extend([b""] * (fields - 1))
    infer_messages.without_raw_tensors(request.SerializeToString())


def outside_raw(size_bytes: int) -> None:
    empty = service_pb2.ModelInferRequest(id="a" * (1 << 22)).ByteSize() - (1 << 22)
    request = service_pb2.ModelInferRequest(id="a" * (size_bytes - empty))
    assert request.ByteSize() == size_bytes
    infer_messages.without_raw_tensors(request.SerializeToString())


def expanded(excess: int) -> None:
    size_bytes, most = 0, 1 << 20
    while size_bytes != most + excess:  # what is added changes the size of what is sent
        size_bytes = most + excess
        press = zlib.compressobj(9, wbits=31)
        body = press.compress(bytes(size_bytes)) + press.flush()
        most = (1 << 20) + guard.MAX_EXPANSION * len(body)
    assert len(decompressed(body, "gzip", 1 << 27)) == size_bytes


def completion(**fields: Any) -> None:
    read_request(CompletionRequest, {"model": "m", "prompt": "a", **fields})


def scores(excess: int) -> None:
    prompts = requests.MAX_SCORES // 2 // 128
    places = {"prompt": ["a"] * prompts, "max_tokens": 128, "logprobs": 1}
    if excess:
        places["logprobs"] = 2
    prepared(json.dumps({"model": "m", **places}).encode())


def biases(count: int) -> dict[str, int]:
    return {str(each): -100 for each in range(1, count + 1)}


# The limit, as the table has it; what is tried; whether the argument of that is the limit.
ROWS: dict[str, tuple[int, Callable[[int], object]]] = {
    "compressed body": (0, expanded),
    "JSON of `infer`": (strict_json.MAX_JSON_MB << 20, infer_json),
    "levels of JSON": (32, levels),
    "inputs": (256, lambda n: infer({"inputs": [tensor([0 + 1], data=["a"])] * n})),
    "outputs": (256, lambda n: infer({"inputs": [], "outputs": [{"name": "y"}] * n})),
    "parameters": (256, lambda n: infer({"parameters": {str(k): 1 for k in range(n)}})),
    "dimensions": (16, lambda n: infer({"inputs": [tensor([1] * n, data=["a"])]})),
    "texts of a tensor": (
        validation.MAX_TEXTS,
        lambda n: infer({"inputs": [tensor([n], data=["a"] * n)]}),
    ),
    "`sequence_id`": (
        validation.MAX_SEQUENCE_ID_BYTES,
        lambda n: infer({"inputs": [], "parameters": {"sequence_id": "a" * n}}),
    ),
    "fields of a message": (1040, message),
    "message without raw tensors": (strict_json.MAX_JSON_MB << 20, outside_raw),
    "fields": (
        requests.MAX_FIELDS,
        lambda n: completion(**dict.fromkeys(map(str, range(n - 2)))),
    ),
    "prompts": (requests.MAX_PROMPTS, lambda n: completion(prompt=["a"] * n)),
    "`n`": (requests.MAX_CHOICES, lambda n: completion(n=n)),
    "prompts x `n`": (
        requests.MAX_SEQUENCES,
        lambda n: completion(prompt=["a"] * (n // 64 + n % 64), n=64),
    ),
    "text": (requests.MAX_TEXT_BYTES, lambda n: completion(prompt="a" * n)),
    "text of a message": (
        requests.MAX_TEXT_BYTES,
        lambda n: read_request(ChatRequest, {"messages": [{"role": "u", "content": "a" * n}]}),
    ),
    "`stop`": (requests.MAX_STOPS, lambda n: completion(stop=["a"] * n)),
    "`stop_token_ids`": (
        requests.MAX_STOP_IDS,
        lambda n: completion(stop_token_ids=[1] * n),
    ),
    "characters of a `stop`": (
        requests.MAX_STOP_CHARACTERS,
        lambda n: completion(stop="a" * n),
    ),
    "`logit_bias`": (requests.MAX_BIASES, lambda n: completion(logit_bias=biases(n))),
    "`logprobs`": (requests.MAX_LOG_PROBS, lambda n: completion(logprobs=n)),
    "log probabilities": (0, scores),
    "tokens of /detokenize": (
        requests.MAX_TOKENS,
        lambda n: read_request(requests.DetokenizeRequest, {"tokens": [1] * n}),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_limit_is_taken_and_one_more_is_refused(name):
    limit, attempt = ROWS[name]
    attempt(limit)
    with pytest.raises(RejectedError):
        attempt(limit + 1)


def test_the_table_has_each_of_them():
    text = (ROOT / "SECURITY.md").read_text()
    table = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    limits = {row[0]: row[1].replace(",", "") for row in table}
    for name, (limit, _) in ROWS.items():
        shown = f"{limit >> 20} MiB" if limit >= 1 << 20 else str(limit)
        assert not limit or shown in limits[name], name
    time = f"{workers.WORK_S:g} s and {workers.WORK_S_PER_MIB:g} s for each MiB"
    assert time in limits["reading a request"]
    assert f"{workers.MEMORY_BYTES >> 30} GiB" in limits["reading a request"]
    assert f"{requests.MAX_SCORES:d}" in limits["log probabilities"]
    assert f"{guard.MAX_EXPANSION} times" in limits["compressed body"]


def test_token_ids_come_back_as_they_are_sent():
    body = json.dumps({"model": "m", "prompt": [5] * 1000}).encode()
    (prompt,) = prepared(body).prompts
    assert prompt.ids == array("I", [5] * 1000)


class _Answers(grpc.GenericRpcHandler):
    def service(self, _: Any) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(answer)


async def _metadata_passes(size_bytes: int) -> bool:
    """Return whether a call whose metadata has so many bytes, all entries counted, is answered."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((_Answers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            own = [("key", "v" * (size_bytes - len("key") - 32))]
            code = await channel.unary_unary("/a/b")(b"", metadata=own).code()
            return {grpc.StatusCode.OK: True, grpc.StatusCode.RESOURCE_EXHAUSTED: False}[code]
    finally:
        await server.stop(0)


async def _until_closed() -> None:
    """Wait until a connection of gRPC without a call is closed, after 300 ms of an idle time."""
    options = [(key, 300 if value == IDLE_S * 1000 else value) for key, value in SERVER_OPTIONS]
    server = grpc.aio.server(options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5))  # and no settings
    try:
        while await reader.read(1000):
            pass
    finally:
        await server.stop(0)


def test_idle_connections_of_grpc_are_closed():
    asyncio.run(asyncio.wait_for(_until_closed(), 60))


def test_metadata_has_one_limit():
    """gRPC alone refuses some of the calls between two limits, at random."""
    text = (ROOT / "SECURITY.md").read_text()
    assert f"| metadata of gRPC | {MAX_METADATA_BYTES >> 10} KiB, " in text
    taken = [asyncio.run(_metadata_passes(MAX_METADATA_BYTES - 512)) for _ in range(5)]
    refused = [asyncio.run(_metadata_passes(MAX_METADATA_BYTES)) for _ in range(5)]
    assert all(taken)
    assert not any(refused)
