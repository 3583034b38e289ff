"""config.pbtxt of a served model, written and read through Triton's protobuf schema."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from export_scripts.triton.parameters import FIELDS, PARAMETERS
from export_scripts.triton.signature import (
    FROM_TEXT,
    TOKENS_OF_ENCODER,
    ModelSignature,
    TensorSignature,
    ensemble,
)
from foundations.files.json_content import Fields

INTERACTIVE_IDLE_US = 60_000_000  # a session without requests ends after this time
# Our engine has many sessions at once and refuses those that exceed its memory.
_MAX_SESSIONS = 1024
# Input of preprocessing -> input of the ensemble.
_TEXT_INPUTS = {
    "QUERY": "INPUT_0",
    "REQUEST_OUTPUT_LEN": "INPUT_1",
    "BAD_WORDS_DICT": "INPUT_2",
    "STOP_WORDS_DICT": "INPUT_3",
}


@dataclass(frozen=True)
class EnsembleStep:
    """A model of an ensemble; the maps are from its tensor names to the ensemble's."""

    model_name: str
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


@dataclass(frozen=True)
class TritonModelConfig:
    """A model's config.pbtxt, and the files of its version folder.

    `backend` is "python", "fastertransformer" or "ensemble". `max_queue_delay_us` turns the
    server's batcher on; None leaves it off.
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
    instance_count: int = 1
    steps: tuple[EnsembleStep, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)  # name -> content

    def to_text(self) -> str:
        """Return the text of config.pbtxt."""
        from google.protobuf import json_format, text_format
        from tritonclient.grpc import model_config_pb2 as schema

        message = json_format.ParseDict(self._message(), schema.ModelConfig())
        return str(text_format.MessageToString(message))

    def _message(self) -> Fields:
        inputs = self.signature.inputs
        message = {
            "name": self.name,
            "max_batch_size": self.max_batch_size,
            "default_model_filename": self.default_model_filename,
            "input": [
                _tensor(each, optional=each.optional, allow_ragged_batch=each.ragged)
                for each in inputs
            ],
            "output": [_tensor(each) for each in self.signature.outputs],
            "model_transaction_policy": {"decoupled": self.decoupled},
            "parameters": {key: {"string_value": text} for key, text in self.parameters.items()},
        }
        if self.backend == "ensemble":
            steps = [{**vars(step), "model_version": -1} for step in self.steps]
            message |= {"platform": "ensemble", "ensemble_scheduling": {"step": steps}}
        else:
            group = {"kind": "KIND_CPU", "count": self.instance_count}
            message |= {"backend": self.backend, "instance_group": [group]}
        if self.interactive:
            message["sequence_batching"] = _sequence_batching(self.backend)
        elif self.max_queue_delay_us is not None:
            delay = {"max_queue_delay_microseconds": self.max_queue_delay_us}
            message["dynamic_batching"] = delay
        if self.backend == "fastertransformer":
            # For ragged inputs, the backend reads a tensor of row shapes with this name (section
            # "ragged batching" of its guide).
            message["batch_input"] = [
                {
                    "kind": "BATCH_ITEM_SHAPE",
                    "target_name": [f"{each.name}_item_shape"],
                    "data_type": "TYPE_INT32",
                    "source_input": [each.name],
                }
                for each in inputs
                if each.ragged
            ]
        return message


def _tensor(tensor: TensorSignature, **more: bool) -> Fields:
    fields = {
        "name": tensor.name,
        "data_type": "TYPE_STRING" if tensor.dtype == "BYTES" else f"TYPE_{tensor.dtype}",
        "dims": list(tensor.dims),
        **more,
    }
    if tensor.reshape is not None:
        fields["reshape"] = {"shape": list(tensor.reshape)}
    return fields


def _sequence_batching(backend: str) -> Fields:
    controls = {"START": "CONTROL_SEQUENCE_START", "END": "CONTROL_SEQUENCE_END"}
    return {
        "max_sequence_idle_microseconds": INTERACTIVE_IDLE_US,
        # A session occupies a whole instance of the C++ backend.
        **(
            {"oldest": {"max_candidate_sequences": _MAX_SESSIONS}}
            if backend == "python"
            else {"direct": {}}
        ),
        "control_input": [
            {"name": name, "control": [{"kind": kind, "int32_false_true": [0, 1]}]}
            for name, kind in controls.items()
        ],
    }


def parse_config(text: str) -> Any:
    """Return the message in the text of a config.pbtxt. Raises ValueError if it is malformed."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2 as schema

    try:
        return text_format.Parse(text, schema.ModelConfig())
    except text_format.ParseError as error:
        raise ValueError(f"not a Triton model configuration: {error}") from error


def parameters_of(config: Any) -> dict[str, str]:
    """Return the parameters in the message of a config.pbtxt."""
    return {key: value.string_value for key, value in config.parameters.items()}


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of an exported model that determine its server's resources."""

    tp_size: int
    pp_size: int = 1
    device: str = "auto"
    instance_count: int = 1

    @property
    def world_size(self) -> int:
        """The number of ranks of an instance."""
        return self.tp_size * self.pp_size


def served_model_of(repository: Path) -> ModelSizes | None:
    """Return the sizes of the only model with ranks in a repository; None if there is not one.

    Unreadable files are skipped: the server reports their problems.
    """
    found = list(filter(None, map(_sizes, sorted(repository.glob("*/config.pbtxt")))))
    return found[0] if len(found) == 1 else None


def _sizes(path: Path) -> ModelSizes | None:
    try:
        config = parse_config(path.read_text(encoding="utf-8"))
        given = config.parameters
        sizes = {
            FIELDS.get(key, key): PARAMETERS[key].kind.read(given[key].string_value)
            for key in ("tensor_para_size", "pipeline_para_size", "device")
            if key in given
        }
    except (OSError, ValueError):
        return None
    # The default count of a group is 1.
    count = sum(group.count or 1 for group in config.instance_group) or 1
    return ModelSizes(**sizes, instance_count=count) if "tp_size" in sizes else None


def ensemble_steps(
    model: ModelSignature, *, model_name: str, decoupled: bool
) -> tuple[EnsembleStep, ...]:
    """Return the three steps of an ensemble with the generation model `model_name`.

    Tensors between steps have lower-case names with a leading underscore.
    """
    outer = ensemble(model)
    options = {tensor.name for tensor in outer.inputs} - set(_TEXT_INPUTS.values())
    results = {tensor.name for tensor in outer.outputs} - {"OUTPUT_0"}
    taken = {tensor.name for tensor in model.inputs}
    produced = {tensor.name for tensor in model.outputs}

    def inner(name: str) -> str:
        return name if name in results else f"_{name.lower()}"

    to_text = {"TOKENS_BATCH": inner("output_ids"), "sequence_length": "sequence_length"}
    if "response_input_lengths" in produced:
        to_text["RESPONSE_INPUT_LENGTHS"] = inner("response_input_lengths")
    elif "input_lengths" in taken and not decoupled:
        # A step that reads the answers of a streaming model may have no other inputs in Triton.
        to_text["REQUEST_INPUT_LEN"] = inner("REQUEST_INPUT_LEN")
    if "is_finished" in produced:
        to_text["IS_FINISHED"] = inner("is_finished")
    wanted = {"output_ids", "response_input_lengths", "is_finished"} & produced
    return (
        EnsembleStep(
            "preprocessing",
            input_map=_TEXT_INPUTS,
            output_map={name: inner(name) for name in sorted(set(FROM_TEXT.values()))},
        ),
        EnsembleStep(
            model_name,
            input_map={name: name for name in sorted(options)}
            | {name: inner(source) for name, source in FROM_TEXT.items() if name in taken},
            output_map={name: inner(name) for name in sorted(wanted | results)},
        ),
        EnsembleStep("postprocessing", input_map=to_text, output_map={"OUTPUT": "OUTPUT_0"}),
    )


def text_encoder_steps(model: ModelSignature, *, model_name: str) -> tuple[EnsembleStep, ...]:
    """Return the two steps of an ensemble with the encoder `model_name`."""
    inner = {"input_ids": "_input_ids", "request_input_len": "request_input_len"}
    options = sorted({tensor.name for tensor in model.inputs} - set(TOKENS_OF_ENCODER))
    return (
        EnsembleStep("tokenizer", input_map={"query": "query"}, output_map=inner),
        EnsembleStep(
            model_name,
            input_map={name: inner[source] for name, source in TOKENS_OF_ENCODER.items()}
            | {name: name for name in options},
            output_map={tensor.name: tensor.name for tensor in model.outputs},
        ),
    )
