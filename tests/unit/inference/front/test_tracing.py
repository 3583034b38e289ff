"""Spans of requests, as an exporter of OpenTelemetry gets them."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiohttp
import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inference.front import tracing
from inference.front.openai.answers import Array, Candidate
from inference.front.request_log import named_call
from tests.unit.inference.front.openai.fake_backend import FakeModel, run

COLLECTOR = "http://127.0.0.1:4318/"
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
ASKED = {"model": "letters", "prompt": "Hi", "max_tokens": 5, "temperature": 0}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Spans that are sent to the collector."""
    exporter = InMemorySpanExporter()

    def made(url: str) -> InMemorySpanExporter:
        assert url == "http://127.0.0.1:4318/v1/traces"
        return exporter

    monkeypatch.setitem(sys.modules, EXPORTER, SimpleNamespace(OTLPSpanExporter=made))
    tracing.tracer_of.cache_clear()
    yield exporter
    tracing.tracer_of.cache_clear()


class Passing(FakeModel):
    """A model that remembers the headers with which a request would be passed on."""

    async def generate(
        self, job: Mapping[str, Array], **asked: Any
    ) -> AsyncGenerator[Sequence[Candidate], None]:
        self.headers = dict(tracing.outgoing())
        async for each in super().generate(job, **asked):
            yield each


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_has_a_span_below_the_clients(sent, streams):
    model = Passing()

    async def check(client: aiohttp.ClientSession) -> None:
        headers = {
            "traceparent": f"00-{TRACE}-{PARENT}-01",
            "tracestate": "a=b",
            "X-Request-Id": "abc",
        }
        body = ASKED | {"stream": streams}
        async with client.post("/v1/completions", json=body, headers=headers) as response:
            await response.read()
            assert response.status == 200
        async with client.get("/v1/models") as response:
            assert response.status == 200

    run(check, model, collector=COLLECTOR)
    tracer = tracing.tracer_of(COLLECTOR)
    assert tracer is not None
    tracer.close()
    (span,) = sent.get_finished_spans()
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.name == "text_completion letters"
    assert model.headers == {
        "traceparent": f"00-{TRACE}-{span.context.span_id:016x}-01",
        "tracestate": "a=b",
    }
    expected = {
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "letters",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.stream": streams,
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
        "slipway.request_id": "abc",
    }
    attributes: dict[str, Any] = dict(span.attributes or {})
    assert {name: attributes.get(name) for name in expected} == expected
    assert "gen_ai.request.seed" not in attributes
    assert span.resource.attributes["service.name"] == "slipway"


def test_the_span_of_a_failure_says_so(sent):
    async def check(client: aiohttp.ClientSession) -> None:
        for body, status in ((ASKED, 503), (ASKED | {"model": "other"}, 404)):
            async with client.post("/v1/completions", json=body) as response:
                assert response.status == status

    run(check, FakeModel(fails_after=0), collector=COLLECTOR)
    tracer = tracing.tracer_of(COLLECTOR)
    assert tracer is not None
    tracer.close()
    failed, refused = sent.get_finished_spans()
    assert (failed.status.is_ok, dict(failed.attributes or {})["error.type"]) == (False, "503")
    assert refused.status.is_ok


def test_spans_without_their_packages_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, EXPORTER, None)
    tracing.tracer_of.cache_clear()
    with pytest.raises(ValueError, match=r"slipway-serving\[otel\]"):
        tracing.tracer_of(COLLECTOR)


class _Calls(grpc.GenericRpcHandler):
    """Calls whose model answers, which are refused, fail or have no answer."""

    def __init__(self, tracer: tracing.Tracer | None) -> None:
        self.named = partial(named_call, "id", logs=False, tracer=tracer)

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        method = details.method

        async def answered(request: bytes, context: Any) -> bytes:
            with self.named(method, context):
                tracing.describe_model("ensemble")
                tracing.describe_model("part of it")
                return request

        async def refused(_: Any, context: Any) -> Any:
            with self.named(method, context):
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
                yield b""

        async def failed(_: bytes, context: Any) -> bytes:
            with self.named(method, context):
                raise KeyError("a fault")

        async def left(_: bytes, context: Any) -> bytes:
            with self.named(method, context):
                return await asyncio.Future[bytes]()

        others = {"/failed/ModelInfer": failed, "/left/ModelInfer": left}
        if other := others.get(method):
            return grpc.unary_unary_rpc_method_handler(other)
        if method == "/a/ModelInfer":
            return grpc.unary_unary_rpc_method_handler(answered)
        return grpc.stream_stream_rpc_method_handler(refused)


@contextlib.asynccontextmanager
async def traced_channel() -> AsyncIterator[grpc.aio.Channel]:
    """Yield a channel to a server whose calls have spans; they are sent when it ends."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Calls(tracing.tracer_of(COLLECTOR)),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)
    await tracing.close_tracer(COLLECTOR)


def test_calls_of_grpc_have_spans(sent):
    async def main() -> None:
        async with traced_channel() as channel:
            metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
            assert await channel.unary_unary("/a/ModelInfer")(b"x", metadata=metadata) == b"x"
            unsampled = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
            assert await channel.unary_unary("/a/ModelInfer")(b"x", metadata=unsampled) == b"x"
            with pytest.raises(grpc.aio.AioRpcError):
                await anext(aiter(channel.stream_stream("/a/ModelStreamInfer")([b"x"])))

    asyncio.run(main())
    answered, refused = sent.get_finished_spans()
    assert answered.name == "generate_content ensemble"
    assert answered.parent is not None
    assert f"{answered.parent.span_id:016x}" == PARENT
    assert dict(answered.attributes or {})["rpc.response.status_code"] == "OK"
    assert (refused.name, refused.status.is_ok) == ("a/ModelStreamInfer", True)
    assert dict(refused.attributes or {})["rpc.response.status_code"] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("method", "status"), [("/failed/ModelInfer", "UNKNOWN"), ("/left/ModelInfer", "CANCELLED")]
)
def test_the_span_of_a_call_without_an_answer_says_so(sent, method, status):
    async def main() -> None:
        async with traced_channel() as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(method)(b"x", timeout=1)

    asyncio.run(main())
    (span,) = sent.get_finished_spans()
    assert dict(span.attributes or {})["rpc.response.status_code"] == status
