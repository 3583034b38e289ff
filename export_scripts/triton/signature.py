"""Inputs and outputs of every served model, from signature.tsv.

The `input` and `output` blocks of config.pbtxt, the client's requests and the backend's answers
follow it. Names, types and shapes are those of the FasterTransformer Triton backend
(triton-inference-server/fastertransformer_backend, all_models/*/config.pbtxt); additions are marked
"added".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from foundations.tables import read_cells

DATA_TYPE = "DATA_TYPE"  # stands for the model's computation type
_PROMPT_TABLE = "request_prompt_embedding"


@dataclass(frozen=True)
class TensorSignature:
    """An input or output of a model.

    `dims` omit the batch axis; -1 is any size. `reshape` is the shape that the model sees, () for a
    scalar per sequence. `ragged` lets the server's batcher join sequences of unequal length.
    """

    name: str
    dtype: str  # as on the wire: UINT32, INT32, UINT64, FP16, FP32, BF16, BOOL, BYTES
    dims: tuple[int, ...]
    doc: str = ""
    optional: bool = False
    reshape: tuple[int, ...] | None = None
    ragged: bool = False


@dataclass(frozen=True)
class ModelSignature:
    """The inputs and outputs of a model, in the order of declaration."""

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...] = ()

    def __add__(self, more: ModelSignature) -> ModelSignature:
        return ModelSignature(self.inputs + more.inputs, self.outputs + more.outputs)

    def each(self, change: Callable[[TensorSignature], TensorSignature]) -> ModelSignature:
        """Return the signature with a function applied to every input and output."""
        return ModelSignature(tuple(map(change, self.inputs)), tuple(map(change, self.outputs)))

    def with_types(self, types: Mapping[str, str]) -> ModelSignature:
        """Return the signature with other types for the named inputs and outputs."""
        return self.each(lambda each: replace(each, dtype=types.get(each.name, each.dtype)))

    def input(self, name: str) -> TensorSignature:
        """Return the input called `name`. Raises KeyError."""
        return {tensor.name: tensor for tensor in self.inputs}[name]

    def output(self, name: str) -> TensorSignature:
        """Return the output called `name`. Raises KeyError."""
        return {tensor.name: tensor for tensor in self.outputs}[name]


# Shapes in the table: B rows, S padded prompt, K beams, R new tokens, W word list width,
# P virtual tokens, H hidden width, L layers.
_, *_ROWS = read_cells(Path(__file__).with_suffix(".tsv"))


def declared(model: str) -> ModelSignature:
    """Return the signature of a model, or the additions that some models have, from the table.

    A scalar is a value per row: (B, 1) on the wire, (B,) for the model.
    """
    sides: dict[str, list[TensorSignature]] = {"input": [], "output": []}
    for models, side, name, dtype, dims, marks, doc in _ROWS:
        if model in models.split(","):
            tensor = TensorSignature(
                name,
                dtype,
                tuple(map(int, dims.split(","))),
                doc,
                optional="optional" in marks,
                reshape=() if "scalar" in marks else None,
                ragged="ragged" in marks,
            )
            sides[side].append(tensor)
    return ModelSignature(tuple(sides["input"]), tuple(sides["output"]))


# model_type in config.pbtxt -> signature of the model.
MODEL_SIGNATURES = {
    **{kind: declared(kind) for kind in ("GPT", "GPT-J")},
    "GPT-NeoX": declared("GPT-J"),
    "Llama": declared("GPT"),  # only ours; the C++ backend has no such model
    **{kind: declared(kind) for kind in ("T5", "T5-Encoder", "bert")},
}
GPT, T5 = MODEL_SIGNATURES["GPT"], MODEL_SIGNATURES["T5"]
# Model types that answer with hidden states, in their computation type.
ENCODERS = ("T5-Encoder", "bert")

PREPROCESSING, POSTPROCESSING = map(declared, ("preprocessing", "postprocessing"))
TOKENIZER = declared("tokenizer")
# Input of a generation model -> output of preprocessing that it receives.
FROM_TEXT = {
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "bad_words_list": "BAD_WORDS_IDS",
    "stop_words_list": "STOP_WORDS_IDS",
    # The names of two of them in encoder-decoder models.
    "sequence_length": "REQUEST_INPUT_LEN",
    "max_output_len": "REQUEST_OUTPUT_LEN",
}

# Input of an encoder -> output of the tokenizer that it receives.
TOKENS_OF_ENCODER = {"input_ids": "input_ids", "sequence_length": "request_input_len"}


def postprocessing(model: ModelSignature) -> ModelSignature:
    """Return postprocessing with the types of tokens and lengths that `model` sends."""
    lengths = model.output("sequence_length").dtype
    tokens = model.output("output_ids").dtype
    return POSTPROCESSING.with_types({"TOKENS_BATCH": tokens, "sequence_length": lengths})


# Inputs and outputs that only our engine has; scores only for models that repeat the prompt.
CHOICES, SCORES = map(declared, ("choices", "scores"))


def ensemble(model: ModelSignature, *, has_sessions: bool = False) -> ModelSignature:
    """Return the signature of an ensemble, from text to text, around a generation model.

    With `has_sessions`, the model has the shapes of `interactive`, and so do the texts.
    """
    text = declared("ensemble")
    text = with_leading_axis(text) if has_sessions else text
    options = tuple(
        replace(tensor, reshape=None)
        for tensor in model.inputs
        if tensor.name not in FROM_TEXT and tensor not in SCORES.inputs
    )
    shared = ("sequence_length", "cum_log_probs", "output_log_probs")
    return text + ModelSignature(options, tuple(map(model.output, shared)))


def text_encoder(model: ModelSignature) -> ModelSignature:
    """Return the signature of an ensemble with an encoder, which has texts in place of IDs."""
    options = tuple(
        replace(tensor, reshape=None)
        for tensor in model.inputs
        if tensor.name not in TOKENS_OF_ENCODER
    )
    return ModelSignature(
        inputs=(*TOKENIZER.inputs, *options),
        outputs=(*model.outputs, TOKENIZER.output("request_input_len")),
    )


def interactive(model: ModelSignature) -> ModelSignature:
    """Return the signature of an interactive model: every shape gets a leading axis of size 1."""
    return with_leading_axis(model + declared("session"))


def with_leading_axis(model: ModelSignature) -> ModelSignature:
    """Return a signature in which every shape has a leading axis, of size 1 on the wire."""

    def with_axis(tensor: TensorSignature) -> TensorSignature:
        reshape = None if tensor.reshape is None else (-1, *tensor.reshape)
        return replace(tensor, dims=(-1, *tensor.dims), reshape=reshape, ragged=False)

    return model.each(with_axis)


def model_signature(model_type: str, *, data_type: str) -> ModelSignature:
    """Return the signature of a model with its computation type, such as fp16.

    Common clients cannot send BF16 tensors, so a bf16 model accepts FP32 prompt tables.
    """
    kind = data_type.upper()
    prompts = "FP32" if kind == "BF16" else kind

    def computed(tensor: TensorSignature) -> TensorSignature:
        dtype = prompts if tensor.name == _PROMPT_TABLE else kind
        return replace(tensor, dtype=dtype) if tensor.dtype == DATA_TYPE else tensor

    return MODEL_SIGNATURES[model_type].each(computed)


def hidden_states(model_type: str) -> tuple[str, ...]:
    """Return the names of an encoder's inputs and outputs that have its computation type.

    Empty for models that generate tokens, and for unknown models.
    """
    if model_type not in ENCODERS:
        return ()
    model = MODEL_SIGNATURES[model_type]
    return tuple(t.name for t in (*model.inputs, *model.outputs) if t.dtype == DATA_TYPE)


# Model types whose C++ models send lengths as INT32, whatever the repository declares. Triton's
# ensembles refuse a type other than the declared one.
_SIGNED_LENGTHS = ("GPT", "GPT-J")


def as_sent_by_fastertransformer(model: ModelSignature, model_type: str) -> ModelSignature:
    """Return a model's signature with the types that NVIDIA's C++ backend really sends."""
    return model.with_types({"sequence_length": "INT32"} if model_type in _SIGNED_LENGTHS else {})
