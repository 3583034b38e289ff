"""config.pbtxt of a served model, written and read through Triton's protobuf schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from export_scripts.triton.signature import ModelSignature, TensorSignature

INTERACTIVE_IDLE_US = 60_000_000  # a session without requests is dropped after this time
# Our engine holds many sessions at once and refuses those that exceed its memory.
_MOST_SESSIONS = 1024


@dataclass(frozen=True)
class EnsembleStep:
    """One model of an ensemble: its tensor names to the ensemble's."""

    model_name: str
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


@dataclass(frozen=True)
class TritonModelConfig:
    """The contents of one model's config.pbtxt.

    `backend` is "python", "fastertransformer" or "ensemble". `max_queue_delay_us` switches the
    server's batcher on; None leaves it off. `batch_input` declares, for ragged
    inputs, the tensor of row shapes that only the fastertransformer backend reads.
    """

    name: str
    backend: str
    max_batch_size: int
    signature: ModelSignature
    parameters: Mapping[str, str] = field(default_factory=dict)
    default_model_filename: str = ""
    decoupled: bool = False
    max_queue_delay_us: int | None = None
    interactive: bool = False
    batch_input: bool = False
    instance_count: int = 1
    steps: tuple[EnsembleStep, ...] = ()

    def problems(self) -> list[str]:
        """Return the settings that Triton or the backend would refuse."""
        found = []
        if self.interactive and self.max_batch_size != 1:
            found.append(
                f"max_batch_size={self.max_batch_size} of an interactive model; it must be 1."
            )
        if self.interactive and self.max_queue_delay_us is not None:
            found.append(
                "an interactive model cannot use dynamic batching; switch one of them off."
            )
        if self.max_batch_size < 1:
            found.append(f"max_batch_size={self.max_batch_size} must be at least 1.")
        return found

    def to_text(self) -> str:
        """Return the text of config.pbtxt. Raises ValueError with every problem."""
        from google.protobuf import text_format

        if problems := self.problems():
            raise ValueError("\n".join(f"{self.name}: {problem}" for problem in problems))
        return str(text_format.MessageToString(self._message()))

    def _message(self) -> Any:
        from tritonclient.grpc import model_config_pb2 as schema

        message = schema.ModelConfig(
            name=self.name,
            max_batch_size=self.max_batch_size,
            default_model_filename=self.default_model_filename,
            input=[_input(schema, tensor) for tensor in self.signature.inputs],
            output=[_output(schema, tensor) for tensor in self.signature.outputs],
            model_transaction_policy=schema.ModelTransactionPolicy(decoupled=self.decoupled),
        )
        for key, value in self.parameters.items():
            message.parameters[key].string_value = value
        if self.backend == "ensemble":
            message.platform = "ensemble"
            _fill_steps(message.ensemble_scheduling, self.steps)
        else:
            message.backend = self.backend
            message.instance_group.add(
                kind=schema.ModelInstanceGroup.KIND_CPU, count=self.instance_count
            )
        if self.max_queue_delay_us is not None:
            message.dynamic_batching.max_queue_delay_microseconds = self.max_queue_delay_us
        if self.interactive:
            _fill_sequence_batching(schema, message.sequence_batching, self.backend)
        if self.batch_input:
            _fill_batch_input(schema, message.batch_input, self.signature.inputs)
        return message


def parse_config(text: str) -> Any:
    """Return the protobuf message in the text of a config.pbtxt. Raises ValueError if malformed."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2 as schema

    try:
        return text_format.Parse(text, schema.ModelConfig())
    except text_format.ParseError as error:
        raise ValueError(f"not a Triton model configuration: {error}") from error


def _data_type(schema: Any, dtype: str) -> int:
    return int(schema.DataType.Value("TYPE_STRING" if dtype == "BYTES" else f"TYPE_{dtype}"))


def _common(schema: Any, tensor: TensorSignature) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": tensor.name,
        "data_type": _data_type(schema, tensor.dtype),
        "dims": list(tensor.dims),
    }
    if tensor.reshape is not None:
        fields["reshape"] = schema.ModelTensorReshape(shape=list(tensor.reshape))
    return fields


def _input(schema: Any, tensor: TensorSignature) -> Any:
    return schema.ModelInput(
        **_common(schema, tensor), optional=tensor.optional, allow_ragged_batch=tensor.ragged
    )


def _output(schema: Any, tensor: TensorSignature) -> Any:
    return schema.ModelOutput(**_common(schema, tensor))


def _fill_steps(scheduling: Any, steps: Iterable[EnsembleStep]) -> None:
    for step in steps:
        message = scheduling.step.add(model_name=step.model_name, model_version=-1)
        message.input_map.update(step.input_map)
        message.output_map.update(step.output_map)


def _fill_sequence_batching(schema: Any, batching: Any, backend: str) -> None:
    batching.max_sequence_idle_microseconds = INTERACTIVE_IDLE_US
    if backend == "python":
        batching.oldest.max_candidate_sequences = _MOST_SESSIONS
    else:
        batching.direct.SetInParent()  # one session occupies an instance
    control_kind = schema.ModelSequenceBatching.Control
    for name, kind in (
        ("START", control_kind.CONTROL_SEQUENCE_START),
        ("END", control_kind.CONTROL_SEQUENCE_END),
    ):
        control_input = batching.control_input.add(name=name)
        control_input.control.add(kind=kind, int32_false_true=[0, 1])


def _fill_batch_input(schema: Any, batch_inputs: Any, inputs: Iterable[TensorSignature]) -> None:
    for tensor in inputs:
        if tensor.ragged:
            # The backend finds the shapes by this name (section "ragged batching" of its guide).
            batch_inputs.add(
                kind=schema.BatchInput.BATCH_ITEM_SHAPE,
                target_name=[f"{tensor.name}_item_shape"],
                data_type=schema.DataType.TYPE_INT32,
                source_input=[tensor.name],
            )
