"""Models that a tritonserver runs: requests are forwarded to it over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as schema
from tritonclient.grpc import service_pb2_grpc

from inference.backend.requests import InferRequest, Outputs, Responses
from inference.front.grpc_server import CHANNEL_OPTIONS
from inference.front.rules import InferError
from inference.front.tracing import outgoing
from inference.front.validation import DATATYPES
from inference.host.messages import FINAL_PARAMETER, set_parameters
from inference.host.models import HostedModel
from inference.host.release_2_51 import Cancellations
from inference.host.tensors import array_of, raw_of
from inference.system.supervision import CANARY_PARAMETER

# Errors on streams have no status field: their text begins with one of these names, unless the
# request itself is invalid.
_ON_STREAMS = ("UNAVAILABLE", "CANCELLED", "INTERNAL")


class TritonConnection:
    """The connection to a tritonserver at a gRPC target."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.aio.insecure_channel(target, CHANNEL_OPTIONS)
        self.calls = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.cancellations = Cancellations()


class RemoteModel(HostedModel):
    """A model of a tritonserver.

    `takes_canaries` is False for a server that would queue a canary behind long requests.
    """

    takes_parameters = True

    def __init__(
        self, config: Any, version: str, server: TritonConnection, *, takes_canaries: bool = True
    ) -> None:
        super().__init__(config, version)
        self.takes_canaries = takes_canaries
        self.is_known = config.backend == "fastertransformer"
        self._server = server

    def _reshape(self, request: InferRequest) -> None:
        """Leave the tensors to tritonserver, which reshapes them."""

    async def _answer(self, request: InferRequest) -> Responses:
        if request.turn is not None and self.keeps_sessions:
            self.sessions.take(request.turn, lambda: None)
        message, calls = self._message(request), self._server.calls
        if self.decoupled:
            call = calls.ModelStreamInfer([message], metadata=outgoing())
        else:
            call = calls.ModelInfer(message, metadata=outgoing())
        try:
            if not self.decoupled:
                yield _outputs(await _uncancelled(call)), True
                return
            while (reply := await _uncancelled(call.read())) is not grpc.aio.EOF:
                if reply.error_message:
                    raise stream_error(reply.error_message)
                answer = reply.infer_response
                final = answer.parameters[FINAL_PARAMETER].bool_param
                yield _outputs(answer), final
                if final:  # let the server end the stream, so that it is not cancelled
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await _uncancelled(call.read())
                    return
            yield {}, True  # releases before 2.34 do not say which response is the last
        except grpc.aio.AioRpcError as error:
            raise InferError(error.details() or "", error.code().name) from None
        except asyncio.CancelledError:  # of this task, or of the call by a server that ends
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise InferError("", "UNAVAILABLE") from None
        finally:
            if not call.done():  # the client has left, or needs no more
                self._server.cancellations.cancel(call)

    def _message(self, request: InferRequest) -> Any:
        message = schema.ModelInferRequest(
            model_name=self.name, model_version=self.version, id=request.id
        )
        for name, value in request.tensors.items():
            datatype, _ = self.forms[name]
            message.inputs.add(name=name, datatype=datatype, shape=value.shape)
            # A BF16 input is held as FP32 in this process.
            typed = value.astype(DATATYPES[datatype], copy=False)
            message.raw_input_contents.append(raw_of(typed))
        for name in request.wanted:
            message.outputs.add(name=name)
        parameters = dict(request.parameters)
        if self.decoupled:
            parameters["triton_enable_empty_final_response"] = True
        if request.is_canary:
            parameters[CANARY_PARAMETER] = True
        if (turn := request.turn) is not None:
            parameters["sequence_id"] = turn.session_id
            parameters |= {"sequence_start": turn.starts, "sequence_end": turn.ends}
        set_parameters(message, parameters)
        return message


def remote_models(
    configs: Mapping[tuple[str, str], Any], server: TritonConnection, *, takes_canaries: bool
) -> dict[str, HostedModel]:
    """Return the models of a server by name; `configs` are by (name, version)."""
    found: dict[str, HostedModel] = {}
    for (name, version), config in sorted(configs.items(), key=lambda e: (e[0][0], int(e[0][1]))):
        model: HostedModel = RemoteModel(config, version, server, takes_canaries=takes_canaries)
        if name in found:  # the latest version answers requests that name none
            model.versions = {**found[name].versions, version: model}
        found[name] = model
    for model in found.values():
        steps = [found[step.model_name] for step in model.config.ensemble_scheduling.step]
        for served in model.versions.values():
            served.keeps_sessions |= any(step.keeps_sessions for step in steps)
    return found


async def _uncancelled(reply: Awaitable[Any]) -> Any:
    """Wait for a reply; unlike gRPC's own wait, cancelling this one does not cancel the call."""
    return await asyncio.shield(asyncio.ensure_future(reply))


def _outputs(answer: Any) -> Outputs:
    """Return the outputs of a ModelInferResponse by name."""
    pairs = zip(answer.outputs, answer.raw_output_contents, strict=False)
    return {
        output.name: array_of(
            raw, output.datatype, output.shape, name=f"'{output.name}'", kind="output"
        )
        for output, raw in pairs
    }


def stream_error(text: str) -> InferError:
    """Return the error that a stream's error message stands for."""
    kind, _, rest = text.partition(": ")
    return InferError(rest, kind) if kind in _ON_STREAMS else InferError(text)
