"""The requests that clients may send, and the errors that they get."""

import functools
import re
from http import HTTPStatus
from typing import NamedTuple

from inference.front.guard import RejectedError

LIVE_PATH, READY_PATH, STATS_PATH = "/v2/health/live", "/v2/health/ready", "/v2/models/stats"
OPENAPI_PATH, INDEX_PATH = "/openapi.json", "/v2/repository/index"
_MODEL = r"/v2/models/(?P<model>[^/?#%\s]+)(?:/versions/(?P<version>[0-9]+))?"
_PATHS = {
    "GET": (
        "/v2", LIVE_PATH, READY_PATH, STATS_PATH, OPENAPI_PATH,
        rf"{_MODEL}(?:/(?P<action>ready|config|stats))?",
    ),
    "POST": (rf"{_MODEL}/(?P<action>infer|generate|generate_stream)", INDEX_PATH),
}  # fmt: skip

SERVICE = "/inference.GRPCInferenceService/"
INFER_CALL = f"{SERVICE}ModelInfer"
STREAM_CALL = f"{SERVICE}ModelStreamInfer"
# Responses while the server is not ready: ServerReadyResponse, HealthCheckResponse (NOT_SERVING).
UNREADY_ANSWERS = {f"{SERVICE}ServerReady": b"", "/grpc.health.v1.Health/Check": b"\x08\x02"}
_HEALTH_CALLS = (f"{SERVICE}ServerLive", *UNREADY_ANSWERS)
_MODEL_CALLS = (
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
)
_CALLS = (*_HEALTH_CALLS, *(SERVICE + n for n in _MODEL_CALLS), INFER_CALL, STREAM_CALL)
_HEALTH = frozenset({LIVE_PATH, READY_PATH, *_HEALTH_CALLS})
CLOSED = "this endpoint is not exposed to clients"
UNREACHABLE = "the server behind the front does not answer; it is starting, or it has ended"
_SOCKETS = "slipway-sockets-"  # prefix of the folder of tritonserver's sockets
# Shared memory of the Python backend, with its own prefix or this project's.
_INTERNAL_NAME = re.compile(r"/?(?:triton_python_backend_shm_region_|slipway-\d+-)[\w-]*")
# Session ids inside the server, see sessions.py.
_SESSION = re.compile(r"\b(session|sequence) (?:[0-9]{10,19}|[0-9a-f]{64})\b")
_STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "UNIMPLEMENTED": HTTPStatus.NOT_IMPLEMENTED,
}


class PathParts(NamedTuple):
    """The model, version and action in an HTTP path, each "" if absent."""

    model: str = ""
    version: str = ""
    action: str = ""


@functools.lru_cache(maxsize=256)
def parts_of_path(method: str, path: str) -> PathParts | None:
    """Return the parts of a path, None if clients may not send such a request."""
    for pattern in _PATHS.get("GET" if method == "HEAD" else method, ()):
        if found := re.fullmatch(pattern, path):
            return PathParts(**found.groupdict(""))
    return None


def passes_grpc(call: str) -> bool:
    """Return whether clients may send a gRPC call, `/service/method`."""
    return call in _CALLS


def is_health(target: str) -> bool:
    """Return whether an HTTP path or a gRPC call is a health check, which needs no token."""
    return target in _HEALTH


def without_internal_names(text: str) -> str:
    """Return an error without the server's internal names of shared memory, sockets and sessions.

    The error may quote megabytes of a request: the time is linear in its length.
    """
    if _SOCKETS in text:
        return UNREACHABLE
    return _SESSION.sub(r"this \1", _INTERNAL_NAME.sub("(internal)", text))


class InferError(RejectedError):
    """The error with which a model answers a request. `grpc_code` is the name of gRPC's status."""

    def __init__(self, message: str, code: str = "INVALID_ARGUMENT") -> None:
        text = without_internal_names(message) or "the model does not answer"
        super().__init__(text, _STATUS.get(code, HTTPStatus.INTERNAL_SERVER_ERROR))
        self.grpc_code = code
