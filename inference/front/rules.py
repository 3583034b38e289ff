"""The requests that clients may send, and the errors that they may see."""

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
# Answers of a server that is not ready: ServerReadyResponse, HealthCheckResponse (NOT_SERVING).
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
CLOSED = "this endpoint is not exposed to clients"
UNREACHABLE = "the server behind the front does not answer; it is starting, or it has ended"
_SOCKETS = "slipway-sockets-"  # of the folder that they are in
# Regions of the Python backend: its own prefix, or that of a server of this project.
_INTERNAL_NAME = re.compile(r"/?(?:triton_python_backend_shm_region_|slipway-\d+-)[\w-]*")
# Ids of sessions as the server has them, see sessions.py.
_SESSION = re.compile(r"\b(session|sequence) (?:[0-9]{10,19}|[0-9a-f]{64})\b")
_STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "UNIMPLEMENTED": HTTPStatus.NOT_IMPLEMENTED,
}


class PathParts(NamedTuple):
    """Model, version and action that a path of HTTP names, "" for none."""

    model: str = ""
    version: str = ""
    action: str = ""


@functools.lru_cache(maxsize=256)
def parts_of_path(method: str, path: str) -> PathParts | None:
    """Return the parts of a path; None means that clients may not send such a request."""
    for each in _PATHS.get("GET" if method == "HEAD" else method, ()):
        if found := re.fullmatch(each, path):
            return PathParts(**found.groupdict(""))
    return None


def passes_grpc(call: str) -> bool:
    """Return whether a call of gRPC, `/service/method`, is one that clients may send."""
    return call in _CALLS


def is_health(target: str) -> bool:
    """Return whether a path of HTTP or a call of gRPC asks for health, which needs no token."""
    return target in (LIVE_PATH, READY_PATH, *_HEALTH_CALLS)


def without_internal_names(text: str) -> str:
    """Return an error of the server without names of its own: of memory, sockets and sessions.

    It may quote megabytes of a request: the time grows with its length alone.
    """
    if _SOCKETS in text:
        return UNREACHABLE
    return _SESSION.sub(r"this \1", _INTERNAL_NAME.sub("(internal)", text))


class InferError(RejectedError):
    """A model does not answer a request. `grpc_code` is the name of gRPC's status."""

    def __init__(self, message: str, code: str = "INVALID_ARGUMENT") -> None:
        text = without_internal_names(message) or "the model does not answer"
        super().__init__(text, _STATUS.get(code, HTTPStatus.INTERNAL_SERVER_ERROR))
        self.grpc_code = code
