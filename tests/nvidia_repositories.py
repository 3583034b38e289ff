"""Model repositories in the form of those made for NVIDIA's backend: its fields, small weights.

The spelling is that of hand-written files (one-line blocks, commas, `False`), which is not how this
project writes a config.pbtxt.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from export_scripts.triton.signature import (
    ModelSignature,
    TensorSignature,
    interactive,
    model_signature,
)

# Text models of a user: a word is its number.
PREPROCESSING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        rows = [[int(word) for word in row[0].decode().split()] for row in given["QUERY"]]
        ids = np.zeros((len(rows), max(map(len, rows))), np.uint32)
        for row, numbers in zip(ids, rows):
            row[: len(numbers)] = numbers
        none = np.tile(np.array([[[0], [-1]]], np.int32), (len(rows), 1, 1))
        made = {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": np.array([[len(row)] for row in rows], np.uint32),
            "REQUEST_OUTPUT_LEN": given["REQUEST_OUTPUT_LEN"],
            "BAD_WORDS_IDS": none,
            "STOP_WORDS_IDS": none,
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(*each) for each in made.items()])
"""
POSTPROCESSING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        ids = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        texts = [" ".join(map(str, row)).encode() for beams in ids for row in beams]
        text = pb_utils.Tensor("OUTPUT", np.array(texts, object))
        return pb_utils.InferenceResponse([text])
"""
PREPROCESSING_CONFIG = """
name: "preprocessing" backend: "python" max_batch_size: 1024
input [
  { name: "QUERY" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "BAD_WORDS_DICT" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "STOP_WORDS_DICT" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "REQUEST_OUTPUT_LEN" data_type: TYPE_UINT32 dims: [ -1 ] }
]
output [
  { name: "INPUT_ID" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "REQUEST_INPUT_LEN" data_type: TYPE_UINT32 dims: [ 1 ] },
  { name: "BAD_WORDS_IDS" data_type: TYPE_INT32 dims: [ 2, -1 ] },
  { name: "STOP_WORDS_IDS" data_type: TYPE_INT32 dims: [ 2, -1 ] },
  { name: "REQUEST_OUTPUT_LEN" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "PROMPT_LEARNING_TASK_NAME_IDS" data_type: TYPE_UINT32 dims: [ 1 ] }
]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
POSTPROCESSING_CONFIG = """
name: "postprocessing" backend: "python" max_batch_size: 1024
input [
  { name: "TOKENS_BATCH" data_type: TYPE_UINT32 dims: [ -1, -1 ] },
  { name: "RESPONSE_INPUT_LENGTHS" data_type: TYPE_INT32 dims: [ -1 ] }
]
output [ { name: "OUTPUT" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
ENSEMBLE_CONFIG = """
name: "ensemble" platform: "ensemble" max_batch_size: 1024
input [
  { name: "INPUT_0" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "INPUT_1" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "INPUT_2" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "INPUT_3" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "runtime_top_k" data_type: TYPE_UINT32 dims: [ 1 ] optional: true }
]
output [
  { name: "OUTPUT_0" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "sequence_length" data_type: TYPE_UINT32 dims: [ -1 ] }
]
ensemble_scheduling { step [
  { model_name: "preprocessing" model_version: -1
    input_map { key: "QUERY" value: "INPUT_0" }
    input_map { key: "REQUEST_OUTPUT_LEN" value: "INPUT_1" }
    input_map { key: "BAD_WORDS_DICT" value: "INPUT_2" }
    input_map { key: "STOP_WORDS_DICT" value: "INPUT_3" }
    output_map { key: "INPUT_ID" value: "_IDS" }
    output_map { key: "REQUEST_INPUT_LEN" value: "_LENGTHS" }
    output_map { key: "REQUEST_OUTPUT_LEN" value: "_WANTED" }
    output_map { key: "BAD_WORDS_IDS" value: "_BAD" }
    output_map { key: "STOP_WORDS_IDS" value: "_STOP" } },
  { model_name: "fastertransformer" model_version: -1
    input_map { key: "input_ids" value: "_IDS" }
    input_map { key: "input_lengths" value: "_LENGTHS" }
    input_map { key: "request_output_len" value: "_WANTED" }
    input_map { key: "bad_words_list" value: "_BAD" }
    input_map { key: "stop_words_list" value: "_STOP" }
    input_map { key: "runtime_top_k" value: "runtime_top_k" }
    output_map { key: "output_ids" value: "_TOKENS" }
    output_map { key: "response_input_lengths" value: "_STARTS" }
    output_map { key: "sequence_length" value: "sequence_length" } },
  { model_name: "postprocessing" model_version: -1
    input_map { key: "TOKENS_BATCH" value: "_TOKENS" }
    input_map { key: "RESPONSE_INPUT_LENGTHS" value: "_STARTS" }
    output_map { key: "OUTPUT" value: "OUTPUT_0" } }
] }
"""
_SESSIONS = """
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  direct { }
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] }
  ]
}
"""
_RAGGED = """
dynamic_batching { max_queue_delay_microseconds: 500 }
batch_input [
  {
    kind: BATCH_ITEM_SHAPE
    target_name: "input_ids_item_shape"
    data_type: TYPE_INT32
    source_input: "input_ids"
  }
]
"""


def add_nvidia_model(
    repository: Path, name: str, parameters: Mapping[str, str], *, keeps_sessions: bool = False
) -> Path:
    """Write a config.pbtxt with `parameters`, and an empty version folder, which is returned."""
    model_type = parameters["model_type"]
    # NVIDIA's type of prompt tables, whatever the model computes in.
    signature = _without_additions(model_signature(model_type, data_type="fp16"))
    if keeps_sessions:
        signature = interactive(signature)
    more = _SESSIONS if keeps_sessions else _RAGGED if model_type == "GPT" else ""
    text = f"""
# Written by hand
name: "{name}"
backend: "fastertransformer"
default_model_filename: "{name}-weights"
max_batch_size: {1 if keeps_sessions else 1024}
model_transaction_policy {{
  decoupled: False
}}
{more}
input [
  {_tensors(signature.inputs, model_type)}
]
output [
  {_tensors(signature.outputs, model_type)}
]
instance_group [
  {{
    count: 1
    kind : KIND_CPU
  }}
]
"""
    for key, value in parameters.items():
        text += f'parameters {{\n  key: "{key}"\n  value: {{ string_value: "{value}" }}\n}}\n'
    return _write(repository, name, text)


def add_text_models(repository: Path) -> None:
    """Add text models of a user around the model `fastertransformer`."""
    for name, text, script in (
        ("preprocessing", PREPROCESSING_CONFIG, PREPROCESSING),
        ("postprocessing", POSTPROCESSING_CONFIG, POSTPROCESSING),
        ("ensemble", ENSEMBLE_CONFIG, ""),
    ):
        version = _write(repository, name, text)
        if script:
            (version / "model.py").write_text(script)


def _write(repository: Path, name: str, text: str) -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(text)
    return version


def _without_additions(signature: ModelSignature) -> ModelSignature:
    inputs, outputs = (
        tuple(each for each in tensors if not each.doc.startswith("added"))
        for tensors in (signature.inputs, signature.outputs)
    )
    return ModelSignature(inputs, outputs)


def _tensors(tensors: tuple[TensorSignature, ...], model_type: str) -> str:
    return ",\n  ".join(_tensor(each, model_type) for each in tensors)


def _tensor(tensor: TensorSignature, model_type: str) -> str:
    """Return a tensor's block; the types of hidden states are left out, or wrong."""
    tensor = replace(tensor, dtype="STRING" if tensor.dtype == "BYTES" else tensor.dtype)
    is_hidden = tensor.dtype == "FP16" and model_type in ("bert", "T5-Encoder")
    lines = [f'name: "{tensor.name}"']
    if is_hidden and model_type == "T5-Encoder":
        lines.append("data_type: TYPE_FP32 # set by the backend")
    elif not is_hidden:
        lines.append(f"data_type: TYPE_{tensor.dtype}")
    lines.append(f"dims: {list(tensor.dims)}")
    if tensor.reshape is not None:
        lines.append(f"reshape: {{ shape: {list(tensor.reshape)} }}")
    if tensor.optional:
        lines.append("optional: true")
    if tensor.ragged:
        lines.append("allow_ragged_batch: true")
    return "{ " + "\n    ".join(lines) + "\n  }"
