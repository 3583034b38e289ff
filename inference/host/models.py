"""The served models of a repository: their signatures, checks of requests, and answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

from tritonclient.grpc import model_config_pb2 as schema

from inference.backend.requests import Array, InferRequest, ModelError, Outputs, Responses
from inference.backend.tensor_model import TensorModel
from inference.decoding.rows import SessionTurn
from inference.front.rules import InferError
from inference.front.tracing import describe_model
from inference.host.engines import EngineProcess
from inference.host.statistics import ModelStatistics

_SHAPE_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)
_REASONS = {"CANCELLED": "CANCELED", "UNAVAILABLE": "REJECTED", "INVALID_ARGUMENT": "BACKEND"}


class OpenSessions:
    """The open sessions of a model, each with the instance that holds its cache.

    A session that is idle for `idle_s` seconds is dropped.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        # By id: the instance, and the time of the last use on the monotonic clock.
        self._open: dict[int | str, tuple[Any, float]] = {}

    def take(self, turn: SessionTurn, choose: Callable[[], Any]) -> Any:
        """Return the instance of a turn's session; `choose` returns one for a new session.

        A turn of an unknown session that does not start one opens none; the model refuses it.
        """
        known = self._open.pop(turn.session_id, None)
        instance = choose() if known is None else known[0]
        if not turn.ends and (turn.starts or known is not None):
            self.count()
            self._open[turn.session_id] = instance, time.monotonic()
        return instance

    def has(self, session_id: int | str) -> bool:
        """Return whether a session is open."""
        return session_id in self._open

    def forget(self, session_id: int | str) -> None:
        """Drop a session."""
        self._open.pop(session_id, None)

    def count(self) -> int:
        """Drop idle sessions; return the number of open ones."""
        oldest = time.monotonic() - self._idle_s
        self._open = {key: value for key, value in self._open.items() if value[1] > oldest}
        return len(self._open)


class HostedModel:
    """A served model; subclasses implement `_answer`.

    Attributes:
        config: its configuration, a message of Triton's schema.
        decoupled: whether it answers with any number of responses.
        statistics: counts and times of its requests.
        versions: all served versions of the model, this one included.
        sessions: its open sessions.
        inputs, outputs: the messages of its tensors by name.
        forms: types and shapes of the inputs by name.
        responses: number of responses so far.
        about: which checkpoint it serves, in which types, by which version of this project.
        takes_canaries: whether it answers a canary soon, however busy it is.
        is_known: whether it is this project's or NVIDIA's, which always answer a small request.
        takes_parameters: whether it may read request parameters.
    """

    takes_canaries = is_known = True
    takes_parameters = False

    def __init__(self, config: Any, version: str) -> None:
        self.config, self.name, self.version = config, config.name, version
        self.decoupled = bool(config.model_transaction_policy.decoupled)
        self.keeps_sessions = config.HasField("sequence_batching")
        self.statistics = ModelStatistics(config.name, version)
        self.versions: dict[str, HostedModel] = {version: self}
        self.sessions = OpenSessions(config.sequence_batching.max_sequence_idle_microseconds / 1e6)
        self.responses = 0
        self.about: Mapping[str, str] = {}
        self.inputs = {tensor.name: tensor for tensor in config.input}
        self.outputs = {tensor.name: tensor for tensor in config.output}
        self.is_ensemble = config.HasField("ensemble_scheduling")
        self._is_batched = config.max_batch_size > 0
        self.forms = {name: self.form(tensor) for name, tensor in self.inputs.items()}
        self._required = {name for name, tensor in self.inputs.items() if not tensor.optional}
        self._reshapes = any(tensor.HasField("reshape") for tensor in self.inputs.values())

    def form(self, tensor: Any) -> tuple[str, list[int]]:
        """Return a tensor's type and its shape in requests, in which -1 stands for any size."""
        kind = schema.DataType.Name(tensor.data_type).removeprefix("TYPE_")
        batch = [-1] if self._is_batched else []
        return kind.replace("STRING", "BYTES"), [*batch, *tensor.dims]

    async def infer(self, request: InferRequest) -> Responses:
        """Yield (outputs, is final) for each response. Raises InferError.

        Closing the generator cancels the request.
        """
        with _Counted(self, request) as counted:
            async with contextlib.aclosing(self._answer(self._checked(request))) as responses:
                async for response in responses:
                    counted.note(final=response[1])
                    yield response

    async def answer(self, request: InferRequest) -> Outputs:
        """Return the outputs of the last non-empty response. Raises InferError."""
        with _Counted(self, request) as counted:
            last = await self._last(self._checked(request))
            counted.note(final=True)
        return last

    def _answer(self, request: InferRequest) -> Responses:
        raise NotImplementedError

    async def _last(self, request: InferRequest) -> Outputs:
        last: Outputs = {}
        async with contextlib.aclosing(self._answer(request)) as responses:
            async for outputs, _ in responses:
                last = outputs or last
        return last

    def _wanted(self, request: InferRequest, values: Mapping[str, Any]) -> Outputs:
        """Return the outputs that a request wants."""
        names = request.wanted or self.outputs
        return {name: value for name, value in values.items() if name in names}

    def rows_of(self, request: InferRequest) -> int:
        """Return the batch size of a checked request."""
        tensor = next(iter(request.tensors.values()), None)
        return len(tensor) if self._is_batched and tensor is not None and tensor.ndim else 1

    def _checked(self, request: InferRequest) -> InferRequest:
        """Check a request against the signature and reshape it for the model.

        Raises InferError with Triton's wording.
        """
        if not request.matches:
            self._check(request)
        if self._reshapes:
            self._reshape(request)
        return request

    def _check(self, request: InferRequest) -> None:
        for name in request.wanted:
            if name not in self.outputs:
                raise InferError(f"unexpected inference output '{name}' for model '{self.name}'")
        about = f"[request id: {request.id or '<id_unknown>'}] "
        rows = None
        for name, value in request.tensors.items():
            if name not in self.inputs:
                raise InferError(f"unexpected inference input '{name}' for model '{self.name}'")
            rows = self._check_shape(about, name, value, rows)
        if not request.tensors.keys() >= self._required:
            missing = [name for name in self.inputs if name in self._required]
            names = ", ".join(repr(name) for name in missing if name not in request.tensors)
            raise InferError(f"the request lacks {names}, which the model requires")
        if self.keeps_sessions and request.turn is None:
            raise InferError(
                f"{about}inference request to model '{self.name}' must specify a non-zero or "
                "non-empty correlation ID"
            )

    def _check_shape(self, about: str, name: str, value: Array, rows: int | None) -> int | None:
        shape, (_, expected) = list(value.shape), self.forms[name]
        if self._is_batched:
            batch_size = shape[0] if shape else 1
            if rows is not None and batch_size != rows:
                raise InferError(
                    f"{about}input '{name}' batch size does not match other inputs for "
                    f"'{self.name}'"
                )
            if batch_size > (most := self.config.max_batch_size):
                raise InferError(
                    f"{about}inference request batch-size must be <= {most} for '{self.name}'"
                )
            rows = batch_size
        sizes = zip(expected, shape, strict=False)
        if len(shape) != len(expected) or any(size not in (-1, own) for size, own in sizes):
            texts = ["[" + ",".join(map(str, sizes)) + "]" for sizes in (expected, shape)]
            raise InferError(
                f"{about}unexpected shape for input '{name}' for model '{self.name}'. Expected "
                f"{texts[0]}, got {texts[1]}. {_SHAPE_NOTE if self._is_batched else ''}".rstrip()
            )
        return rows

    def _reshape(self, request: InferRequest) -> None:
        """Give a request's tensors the shapes that the model's `reshape` asks for."""
        for name, value in request.tensors.items():
            if (tensor := self.inputs[name]).HasField("reshape") and -1 not in tensor.reshape.shape:
                shape = (*value.shape[: self._is_batched], *tensor.reshape.shape)
                request.tensors[name] = value.reshape(shape)


class _Counted:
    """Counts a request in its model's statistics, with its time and its outcome."""

    def __init__(self, model: HostedModel, request: InferRequest) -> None:
        describe_model(model.name)
        self._model, self._request = model, request
        turn = request.turn
        self._is_new = turn is not None and not model.sessions.has(turn.session_id)
        self._reason = "CANCELED"  # of the failure; "" after success

    def __enter__(self) -> _Counted:
        self._model.statistics.pending += 1
        self._began = time.perf_counter_ns()
        return self

    def note(self, *, final: bool) -> None:
        """Count a response."""
        self._model.responses += 1
        if final:
            self._reason = ""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        model, statistics = self._model, self._model.statistics
        taken_ns = time.perf_counter_ns() - self._began
        statistics.pending -= 1
        if isinstance(error, InferError):
            self._reason = _REASONS.get(error.grpc_code, "OTHER")
            turn = self._request.turn
            if turn is not None and self._is_new:  # a stopping server would wait for its next turn
                model.sessions.forget(turn.session_id)
        elif isinstance(error, Exception):  # an internal error
            self._reason = "OTHER"
        elif self._request.is_answered:
            self._reason = ""
        # A canary that a busy model refuses is not a failure.
        is_busy = self._request.is_canary and self._reason in ("REJECTED", "CANCELED")
        if not self._reason:
            statistics.succeeded(model.rows_of(self._request), taken_ns)
        elif not is_busy:
            statistics.failed(self._reason, taken_ns)


class HostedTextModel(HostedModel):
    """A model that runs in this process."""

    def __init__(self, config: Any, version: str, model: TensorModel) -> None:
        super().__init__(config, version)
        self._model = model

    async def _answer(self, request: InferRequest) -> Responses:
        yield await self._last(request), True

    async def _last(self, request: InferRequest) -> Outputs:
        try:
            return self._wanted(request, await self._model.answer_request(request))
        except ModelError as error:
            raise InferError(str(error), error.code) from None


class HostedEngines(HostedModel):
    """A model with an engine; its instances take requests in turn."""

    def __init__(self, config: Any, version: str, instances: Sequence[EngineProcess]) -> None:
        super().__init__(config, version)
        self.instances = tuple(instances)
        self._turns = cycle(self.instances)

    async def _answer(self, request: InferRequest) -> Responses:
        try:
            answer = self._instance(request).infer(request, queued=self.statistics.queued)
            async with contextlib.aclosing(answer) as responses:
                async for outputs, final in responses:
                    yield outputs if request.wants_tokens else self._wanted(request, outputs), final
        except ModelError as error:
            raise InferError(str(error), error.code) from None

    def _instance(self, request: InferRequest) -> EngineProcess:
        """Return the next instance, or the one that holds the request's session."""
        if request.turn is None or not self.keeps_sessions:
            return next(self._turns)
        instance: EngineProcess = self.sessions.take(request.turn, lambda: next(self._turns))
        return instance


class HostedEnsemble(HostedModel):
    """A chain of models; each step takes tensors of the request or of earlier steps."""

    def __init__(self, config: Any, version: str, models: Mapping[str, HostedModel]) -> None:
        """Look up the models of the steps. Raises ValueError for steps that do not fit together."""
        super().__init__(config, version)
        self._steps = tuple(
            (models[step.model_name], dict(step.input_map), dict(step.output_map))
            for step in config.ensemble_scheduling.step
        )
        if problem := next(self._problems(), None):
            raise ValueError(f"config.pbtxt of {self.name}: {problem}")
        self.keeps_sessions = any(model.keeps_sessions for model, _, _ in self._steps)

    def _problems(self) -> Iterator[str]:
        known = set(self.inputs)
        for model, takes, gives in self._steps:
            if unknown := {*takes} - {*model.inputs} or {*gives} - {*model.outputs}:
                yield f"{model.name} has no {', '.join(sorted(unknown))}"
            if model.decoupled and not self.decoupled:
                yield (
                    f"its step {model.name} gives any number of responses; set decoupled in the "
                    "model_transaction_policy of both, or of none"
                )
            if absent := ", ".join(sorted(set(takes.values()) - known)):
                yield f"no step before {model.name} makes {absent}, which it takes"
            known |= set(gives.values())
        if absent := ", ".join(sorted(set(self.outputs) - known)):
            yield f"no step makes {absent}"

    async def _answer(self, request: InferRequest) -> Responses:
        async with contextlib.aclosing(self._run(0, request, request.tensors)) as responses:
            async for values, final in responses:
                yield self._wanted(request, values), final

    async def _run(
        self, number: int, request: InferRequest, values: Mapping[str, Any]
    ) -> Responses:
        """Run the steps from `number` on, once for each response of the step before."""
        if number == len(self._steps):
            yield values, True
            return
        model, takes, gives = self._steps[number]
        tensors = {tensor: values[name] for tensor, name in takes.items() if name in values}
        step = InferRequest(
            tensors,
            wanted=tuple(gives),
            turn=request.turn,
            id=request.id,
            is_canary=request.is_canary,
        )
        async with contextlib.aclosing(model.infer(step)) as responses:
            async for outputs, final in responses:
                new = {name: outputs[key] for key, name in gives.items() if key in outputs}
                rest = self._run(number + 1, request, {**values, **new})
                async with contextlib.aclosing(rest) as frames:
                    async for results, is_last in frames:
                        yield results, final and is_last
