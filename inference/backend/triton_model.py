"""Arguments, tensors and responses of the models in Triton's Python backend.

`triton_python_backend_utils` exists only inside the server's stub process; it is imported where it
is used.
"""

import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from export_scripts.triton.parameters import FLAG, TEXT, Kind
from inference.backend.instances import Instance

Args = Mapping[str, str]
Tensors = Mapping[str, "np.ndarray[Any, Any]"]


def config_parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters of a model's configuration, as Triton gives it in JSON."""
    return {key: value["string_value"] for key, value in config.get("parameters", {}).items()}


class ModelArguments:
    """The arguments with which Triton loads a model.

    Attributes:
        instance: the place of this process among the model's instances.
        decoupled: whether the model answers a request with more than one response.
        session_idle_s: longest pause of a session, None for a model without sessions.
        bf16_inputs: names of the inputs that arrive as BF16.
    """

    def __init__(self, args: Mapping[str, str]) -> None:
        self.config: dict[str, Any] = json.loads(args["model_config"])
        self.model_folder = Path(args["model_repository"])
        self.version_folder = self.model_folder / args["model_version"]
        self.parameters = config_parameters(self.config)
        self.instance = Instance.of(self.config, args.get("model_instance_name", ""))
        policy = self.config.get("model_transaction_policy", {})
        self.decoupled = bool(policy.get("decoupled", False))
        batching = self.config.get("sequence_batching")
        idle_us = None if batching is None else batching["max_sequence_idle_microseconds"]
        self.session_idle_s = None if idle_us is None else idle_us / 1e6
        inputs = self.config.get("input", [])
        self.bf16_inputs = frozenset(e["name"] for e in inputs if e["data_type"] == "TYPE_BF16")

    def read(self, key: str, kind: Kind = TEXT, *, default: str | None = None) -> Any:
        """Return a parameter. Raises ValueError if it is not of its kind, or needed and absent."""
        text = self.parameters.get(key, default)
        try:
            if text is None:
                raise ValueError("is missing")
            return kind.read(text)
        except ValueError as error:
            shown = key if text is None else f"{key}={text!r}"
            raise ValueError(
                f"config.pbtxt of {self.model_folder.name}: parameter {shown} {error}"
            ) from None

    def flag(self, key: str) -> bool:
        """Return a 0/1 parameter, False if absent. Raises ValueError for anything else."""
        return bool(self.read(key, FLAG, default="0"))


def request_tensors(request: Any, *, bf16: Collection[str] = ()) -> dict[str, np.ndarray[Any, Any]]:
    """Return the inputs of a Triton request by name; `bf16` ones, which numpy lacks, as FP32."""
    return {
        tensor.name(): _from_bf16(tensor) if tensor.name() in bf16 else tensor.as_numpy()
        for tensor in request.inputs()
    }


def _from_bf16(tensor: Any) -> np.ndarray[Any, Any]:
    from torch.utils.dlpack import from_dlpack

    return np.asarray(from_dlpack(tensor.to_dlpack()).float().numpy())


def response(outputs: Mapping[str, Any], wanted: Collection[str]) -> Any:
    """Return a Triton response with those of `outputs` that the client wants.

    They are arrays, or torch tensors.
    """
    import triton_python_backend_utils as pb_utils

    tensors = [
        pb_utils.Tensor(name, value)
        if isinstance(value, np.ndarray)
        else pb_utils.Tensor.from_dlpack(name, value.contiguous())
        for name, value in outputs.items()
        if name in wanted
    ]
    return pb_utils.InferenceResponse(tensors)


def error_response(message: str, code: str = "INVALID_ARG") -> Any:
    """Return a Triton response that carries an error; `code` names one of TritonError's codes."""
    import triton_python_backend_utils as pb_utils

    return pb_utils.InferenceResponse(
        error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    )


def with_readable_errors(load: Callable[[Any, Args], None]) -> Callable[[Any, Args], None]:
    """Wrap `initialize`: file names in messages as UTF-8, without which the process would end."""

    @functools.wraps(load)
    def initialize(model: Any, args: Args) -> None:
        try:
            load(model, args)
        except Exception as error:
            text = str(error)
            readable = text.encode(errors="surrogateescape").decode(errors="replace")
            if readable == text:
                raise
            raise ValueError(readable) from error

    return initialize


class RequestInputs(dict[str, "np.ndarray[Any, Any]"]):
    """The inputs of one request by name. Raises ValueError for one that is missing."""

    def __missing__(self, name: str) -> NoReturn:
        raise ValueError(f"{name}: required input is missing")


class TensorModel:
    """A model that answers each request at once; subclasses add `setup` and `run`."""

    @with_readable_errors
    def initialize(self, args: Args) -> None:
        """Load the model (called by Triton)."""
        arguments = ModelArguments(args)
        self.interactive = arguments.flag("interactive")
        self.setup(arguments)

    def setup(self, arguments: ModelArguments) -> None:
        """Prepare for `run`. Raises ValueError if the model cannot be loaded."""
        raise NotImplementedError

    def run(self, tensors: Tensors) -> dict[str, np.ndarray[Any, Any]]:
        """Return the outputs of one request. Raises ValueError for a bad request."""
        raise NotImplementedError

    def turn(self, tensors: Tensors, *, continues: bool) -> dict[str, np.ndarray[Any, Any]]:
        """Return the outputs of a turn, which starts a session or `continues` it; see `run`."""
        del continues
        return self.run(tensors)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests (called by Triton)."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        tensors = RequestInputs(request_tensors(request))
        try:
            outputs = self._run_turn(request, tensors) if self.interactive else self.run(tensors)
        except ValueError as error:
            return error_response(str(error))
        except Exception as error:  # any failure is this request's answer, not its neighbours'
            return error_response(str(error) or type(error).__name__, "INTERNAL")
        return response(outputs, request.requested_output_names())

    def _run_turn(self, request: Any, tensors: Tensors) -> dict[str, np.ndarray[Any, Any]]:
        """Answer one turn of a session, whose tensors have one more axis, of size 1, in front."""
        import triton_python_backend_utils as pb_utils

        starts = bool(request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        outputs = self.turn(
            RequestInputs((name, value[0]) for name, value in tensors.items()),
            continues=bool(request.correlation_id()) and not starts,
        )
        return {name: value[None] for name, value in outputs.items()}
