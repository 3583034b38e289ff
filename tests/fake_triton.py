"""A stand-in for tritonserver's gRPC: ready models of config.pbtxt that answer as a test wants."""

# ruff: noqa: N802, ARG002 (names and arguments of the service)

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

Infer = Callable[[Any], object]  # takes the request; raises RefusedError, or returns to answer


class RefusedError(Exception):
    """The answer to a request is this error."""


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers for models by name, each with its configuration; `infer` decides on requests."""

    def __init__(self, configs: Mapping[str, Any], infer: Infer = lambda _: None) -> None:
        self.configs = configs
        self.infer = infer
        self.requests: list[Any] = []

    def ServerLive(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name in self.configs)

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        index = service_pb2.RepositoryIndexResponse()
        for name in self.configs:
            index.models.add(name=name, version="1", state="READY")
        return index

    def ModelConfig(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelConfigResponse(config=self.configs[request.name])

    def ModelInfer(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        try:
            self.infer(request)
        except RefusedError as error:
            context.abort(grpc.StatusCode.INTERNAL, str(error))
        return service_pb2.ModelInferResponse(model_name=request.model_name)

    def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Any:
        for request in request_iterator:
            self.requests.append(request)
            yield service_pb2.ModelStreamInferResponse(
                infer_response=service_pb2.ModelInferResponse(model_name=request.model_name)
            )
            try:
                self.infer(request)
            except RefusedError as error:
                yield service_pb2.ModelStreamInferResponse(error_message=str(error))
                continue
            last = service_pb2.ModelInferResponse(model_name=request.model_name)
            last.parameters["triton_final_response"].bool_param = True
            yield service_pb2.ModelStreamInferResponse(infer_response=last)


@contextmanager
def served(fake: FakeTriton, address: str = "127.0.0.1:0") -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield f"{address.rpartition(':')[0]}:{port}"
    finally:
        server.stop(None).wait()
