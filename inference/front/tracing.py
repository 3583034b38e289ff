"""OpenTelemetry spans, one for each client request; they need the packages of the extra `otel`.

A collector receives them over OTLP. OpenTelemetry's own variables, such as OTEL_SERVICE_NAME,
OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS, configure the rest. Attributes have the names of
its semantic conventions for HTTP, RPC and generative AI.
"""

import asyncio
import contextlib
import functools
import importlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

# The span of the request that is being answered.
_SPAN: ContextVar[Any] = ContextVar("span", default=None)
_LIBRARIES = (
    "opentelemetry.sdk.trace",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.sdk.resources",
    "opentelemetry.trace",
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
_MISSING = "spans need the packages of the extra otel: pip install 'slipway-serving[otel]'"
_LAST_S = 2.0


class Tracer:
    """Makes spans and sends them to a collector, such as http://127.0.0.1:4318."""

    def __init__(self, collector: str) -> None:
        """Raises ValueError if the packages are not installed."""
        try:
            trace, export, resources, api, context, otlp = map(importlib.import_module, _LIBRARIES)
        except ImportError as error:
            raise ValueError(f"otlp_collector={collector}: {_MISSING}") from error
        name = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "slipway")}
        self._provider = trace.TracerProvider(
            resource=resources.Resource.create(name), shutdown_on_exit=False
        )
        exporter = otlp.OTLPSpanExporter(f"{collector.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("slipway")
        self._propagator = context.TraceContextTextMapPropagator()
        self._kind = api.SpanKind.SERVER

    @contextlib.contextmanager
    def span(
        self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]
    ) -> Iterator[None]:
        """Trace the block as a span, whose parent is the `traceparent` of the headers.

        `note_status`, `describe_model` and `describe_span` add attributes to it.
        """
        with self._tracer.start_as_current_span(
            name,
            self._propagator.extract(headers),
            kind=self._kind,
            attributes=attributes,
            record_exception=False,  # the log has it
            set_status_on_exception=False,
        ) as span:
            _SPAN.set(span)
            try:
                yield
            finally:
                _SPAN.set(None)

    def close(self) -> None:
        """Send the spans that are still queued."""
        self._provider.shutdown()


@functools.cache
def tracer_of(collector: str | None) -> Tracer | None:
    """Return this process's tracer for a collector, None without one. Raises ValueError."""
    return None if collector is None else Tracer(collector)


def outgoing() -> tuple[tuple[str, str], ...]:
    """Return the headers that pass the current span on as the parent (W3C Trace Context)."""
    if _SPAN.get() is None:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return tuple(headers.items())


async def close_tracer(collector: str | None) -> None:
    """Send the spans that are still queued, for 2 s at most."""
    with contextlib.suppress(TimeoutError, ValueError):
        if (tracer := tracer_of(collector)) is not None:
            await asyncio.wait_for(asyncio.to_thread(tracer.close), _LAST_S)


def note_status(status: str | int, *, failed: bool) -> None:
    """Record in the current span, if any, the request's status and whether the server has failed.

    `status` is a number for HTTP, a name for gRPC.
    """
    if (span := _SPAN.get()) is None:
        return
    is_http = isinstance(status, int)
    name = "http.response.status_code" if is_http else "rpc.response.status_code"
    span.set_attribute(name, status)
    if failed:
        from opentelemetry.trace import StatusCode

        span.set_status(StatusCode.ERROR)
        span.set_attribute("error.type", str(status))


def describe_model(name: str) -> None:
    """Record in the current span the model that answers, unless `describe_span` has done so."""
    span = _SPAN.get()
    if span is None or not span.is_recording():  # the sampler or the client has dropped it
        return
    if "gen_ai.request.model" not in span.attributes:
        describe_span("generate_content", name, {})


def describe_span(operation: str, model: str, attributes: Mapping[str, Any]) -> None:
    """Add the attributes of a generative AI request to the current span, if any.

    Names follow OpenTelemetry's conventions for generative AI. None values are left out.
    """
    if (span := _SPAN.get()) is not None:
        span.update_name(f"{operation} {model}")
        own = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "slipway",
            "gen_ai.request.model": model,
        }
        more = {key: value for key, value in attributes.items() if value is not None}
        span.set_attributes(own | more)
