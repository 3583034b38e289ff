"""Inputs and outputs of every served model, one table per kind.

The `input`/`output` blocks of config.pbtxt, the client's requests and the backend's answers all
come from here. Names, types and shapes are those of the FasterTransformer Triton backend
(triton-inference-server/fastertransformer_backend, all_models/*/config.pbtxt); additions are marked
"added".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

DATA_TYPE = "DATA_TYPE"  # stands for the type in which a model computes


@dataclass(frozen=True)
class TensorSignature:
    """One input or output of a model.

    `dims` leave out the batch axis, -1 is any size. `reshape` is the shape the model sees, ()
    for a scalar per sequence. `ragged` lets the server's batcher join sequences of unequal length.
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
    """Inputs and outputs of one model, in the order they are declared."""

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...] = ()

    def __add__(self, more: ModelSignature) -> ModelSignature:
        return ModelSignature(self.inputs + more.inputs, self.outputs + more.outputs)

    def each(self, change: Callable[[TensorSignature], TensorSignature]) -> ModelSignature:
        """Return the signature with every input and output changed."""
        return ModelSignature(tuple(map(change, self.inputs)), tuple(map(change, self.outputs)))

    def with_types(self, types: Mapping[str, str]) -> ModelSignature:
        """Return the signature with other types of the inputs and outputs that are named."""
        return self.each(lambda each: replace(each, dtype=types.get(each.name, each.dtype)))

    def input(self, name: str) -> TensorSignature:
        """Return the input called `name`. Raises KeyError."""
        return {tensor.name: tensor for tensor in self.inputs}[name]

    def output(self, name: str) -> TensorSignature:
        """Return the output called `name`. Raises KeyError."""
        return {tensor.name: tensor for tensor in self.outputs}[name]


def _scalar(name: str, dtype: str, doc: str, *, optional: bool = True) -> TensorSignature:
    """One value per row: (B, 1) on the wire, (B,) for the model."""
    return TensorSignature(name, dtype, (1,), doc, optional=optional, reshape=())


_tensor, _optional = TensorSignature, functools.partial(TensorSignature, optional=True)


# Shapes in the texts: B rows, S padded prompt, K beams, R new tokens, W word list width,
# P virtual tokens, H hidden width, L layers.

_SAMPLING = (
    _scalar("runtime_top_k", "UINT32", "candidates to sample from; 1 is greedy, 0 means top-p"),
    _scalar("runtime_top_p", "FP32", "probability mass to sample from, 0 to 1"),
    _scalar("beam_search_diversity_rate", "FP32", "added to a candidate per rank in its beam"),
    _scalar("temperature", "FP32", "divides the logits; 0 is greedy"),
    _scalar("len_penalty", "FP32", "exponent of the length that divides beam scores"),
    _scalar("repetition_penalty", "FP32", "divides logits of tokens already present; 1 is neutral"),
    _scalar("random_seed", "UINT64", "seed of the sequence's generator, default 0"),
    _scalar("is_return_log_probs", "BOOL", "also return cum_log_probs and output_log_probs"),
    _scalar(
        "beam_width",
        "UINT32",
        "hypotheses per sequence, 1 to 64; equal for all sequences of a request",
    ),
    _scalar("start_id", "UINT32", "first token of an empty prompt (T5: of the decoder)"),
    _scalar("end_id", "UINT32", "token that ends a sequence"),
    _optional("stop_words_list", "INT32", (2, -1), "token ids above their end offsets"),
    _optional("bad_words_list", "INT32", (2, -1), "token ids above their end offsets"),
)
_DECAY = (
    _scalar("top_p_decay", "FP32", "factor applied to top-p after every token"),
    _scalar("top_p_min", "FP32", "lower limit of the decayed top-p"),
    _scalar("top_p_reset_ids", "UINT32", "token that restores the first top-p"),
)
_TASK = _scalar(
    "prompt_learning_task_name_ids", "UINT32", "index of the loaded prompt table to use"
)
_PROMPT_EMBEDDING = _optional(
    "request_prompt_embedding", DATA_TYPE, (-1, -1), "prompt table of this request"
)
_PROMPT_LENGTHS = _scalar("request_prompt_lengths", "UINT32", "virtual tokens in the row's table")
_ADDED = (
    _scalar("presence_penalty", "FP32", "added: subtracted from logits of tokens already present"),
    _scalar("min_length", "INT32", "added: tokens before the end token is allowed"),
)
_GENERATION_REQUIRED = (
    _tensor("input_ids", "UINT32", (-1,), "prompt, right-padded"),
    _scalar("input_lengths", "UINT32", "tokens of the row without padding", optional=False),
    _tensor("request_output_len", "UINT32", (-1,), "new tokens wanted, (B, 1)"),
)
_GENERATION_OUTPUTS = (
    _tensor("output_ids", "UINT32", (-1, -1), "(B, K, S+R): prompt, answer, end tokens"),
    _tensor("sequence_length", "UINT32", (-1,), "(B, K): padded prompt plus new tokens"),
)
_LOG_PROBS = (
    _tensor("cum_log_probs", "FP32", (-1,), "(B, K): log probability of the answer"),
    _tensor("output_log_probs", "FP32", (-1, -1), "(B, K, R): log probability of each token"),
)

GPT = ModelSignature(
    inputs=(
        replace(_GENERATION_REQUIRED[0], ragged=True),
        *_GENERATION_REQUIRED[1:],
        *_SAMPLING[:8],
        _scalar("is_return_context_embeddings", "BOOL", "also return context_embeddings"),
        *_SAMPLING[8:],
        _TASK,
        _PROMPT_EMBEDDING,
        _PROMPT_LENGTHS,
        _scalar("request_prompt_type", "UINT32", "1 soft prompt, 3 p/prompt tuning"),
        *_DECAY,
        *_ADDED,
        _scalar(
            "is_return_context_cum_log_probs",
            "BOOL",
            "added: include the prompt in cum_log_probs",
        ),
    ),
    outputs=(
        *_GENERATION_OUTPUTS,
        _tensor(
            "response_input_lengths",
            "INT32",
            (-1,),
            "(B, K): where the answer starts in output_ids",
        ),
        *_LOG_PROBS,
        _tensor("context_embeddings", "FP32", (-1, -1), "(B, K, H): summed hidden states"),
        _tensor("is_finished", "BOOL", (-1,), "added: (B, K): ended before the limit"),
    ),
)
GPTJ = ModelSignature(
    inputs=(*_GENERATION_REQUIRED, *_SAMPLING, _TASK, *_DECAY, *_ADDED),
    outputs=(*_GENERATION_OUTPUTS, *_LOG_PROBS),
)

_ENCODER_REQUIRED = (
    _tensor("input_ids", "UINT32", (-1,), "encoder input, right-padded"),
    _scalar("sequence_length", "UINT32", "tokens of the row without padding", optional=False),
)
_IA3_TASKS = _scalar("ia3_tasks", "INT32", "index of the IA3 adapter to use")
T5 = ModelSignature(
    inputs=(
        *_ENCODER_REQUIRED,
        _scalar("max_output_len", "UINT32", "new tokens wanted", optional=False),
        *_SAMPLING,
        _TASK,
        _PROMPT_LENGTHS,
        _PROMPT_EMBEDDING,
        _IA3_TASKS,
        *_DECAY,
    ),
    outputs=(
        _tensor("output_ids", "INT32", (-1, -1), "(B, K, R): new tokens only"),
        _tensor("sequence_length", "INT32", (-1,), "(B, K): new tokens with the end token"),
        *_LOG_PROBS,
    ),
)
T5_ENCODER = ModelSignature(
    inputs=(
        *_ENCODER_REQUIRED,
        _scalar("is_return_attentions", "BOOL", "also return output_attentions"),
        _IA3_TASKS,
    ),
    outputs=(
        _tensor("output_hidden_state", DATA_TYPE, (-1, -1), "(B, S, H)"),
        _tensor("output_attentions", DATA_TYPE, (-1, -1, -1, -1), "(B, L, heads, S, S)"),
    ),
)
BERT = ModelSignature(
    inputs=(
        _tensor("input_hidden_state", DATA_TYPE, (-1, -1), "(B, S, H) after the embedding norm"),
        _scalar("sequence_lengths", "INT32", "positions without padding", optional=False),
    ),
    outputs=(_tensor("output_hidden_state", DATA_TYPE, (-1, -1), "(B, S, H)"),),
)

# model_type, as config.pbtxt spells it, to the signature of the model.
MODEL_SIGNATURES: dict[str, ModelSignature] = {
    "GPT": GPT,
    "GPT-J": GPTJ,
    "GPT-NeoX": GPTJ,
    "Llama": GPT,  # ours alone; the C++ backend has no such model
    "T5": T5,
    "T5-Encoder": T5_ENCODER,
    "bert": BERT,
}
# Those that answer with hidden states, in the type that they compute in.
ENCODERS = ("T5-Encoder", "bert")

PREPROCESSING = ModelSignature(
    inputs=(
        _tensor("QUERY", "BYTES", (1,), "text of the row"),
        _optional("BAD_WORDS_DICT", "BYTES", (1,), "one CSV record of words"),
        _optional("STOP_WORDS_DICT", "BYTES", (1,), "one CSV record of words"),
        _tensor("REQUEST_OUTPUT_LEN", "UINT32", (-1,), "new tokens wanted"),
    ),
    outputs=(
        _tensor("INPUT_ID", "UINT32", (-1,), "token ids, right-padded"),
        _tensor("REQUEST_INPUT_LEN", "UINT32", (1,), "tokens of the row without padding"),
        _tensor("BAD_WORDS_IDS", "INT32", (2, -1), "token ids above their end offsets"),
        _tensor("STOP_WORDS_IDS", "INT32", (2, -1), "token ids above their end offsets"),
        _tensor("REQUEST_OUTPUT_LEN", "UINT32", (-1,), "as given"),
        _tensor("PROMPT_LEARNING_TASK_NAME_IDS", "UINT32", (1,), "declared, never produced"),
    ),
)
POSTPROCESSING = ModelSignature(
    inputs=(
        _tensor("TOKENS_BATCH", "UINT32", (-1, -1), "(B, K, L): prompt, answer, end tokens"),
        _optional("RESPONSE_INPUT_LENGTHS", "INT32", (-1,), "(B, K): where the answer starts"),
        _optional("sequence_length", "UINT32", (-1,), "(B, K): prompt and answer"),
        _optional("REQUEST_INPUT_LEN", "UINT32", (1,), "added: prompt length of the row"),
        _optional("IS_FINISHED", "BOOL", (-1,), "added: (B, K): the answer is complete"),
    ),
    outputs=(_tensor("OUTPUT", "BYTES", (-1,), "(B, K): text"),),
)
TOKENIZER = ModelSignature(
    inputs=(_tensor("query", "BYTES", (1,), "text of the row"),),
    outputs=(
        _tensor("input_ids", "UINT32", (-1,), "token ids with the end token, right-padded"),
        _tensor("request_input_len", "UINT32", (1,), "tokens of the row without padding"),
    ),
)

_ENSEMBLE_TEXT = ModelSignature(
    inputs=(
        _tensor("INPUT_0", "BYTES", (1,), "text of the row"),
        _tensor("INPUT_1", "UINT32", (-1,), "new tokens wanted"),
        _optional("INPUT_2", "BYTES", (1,), "bad words, one CSV record"),
        _optional("INPUT_3", "BYTES", (1,), "stop words, one CSV record"),
    ),
    outputs=(_tensor("OUTPUT_0", "BYTES", (-1,), "(B, K): text"),),
)
# Inputs of a generation model to the output of preprocessing that each takes.
FROM_TEXT = {
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "bad_words_list": "BAD_WORDS_IDS",
    "stop_words_list": "STOP_WORDS_IDS",
    # An encoder-decoder model's names for two of them.
    "sequence_length": "REQUEST_INPUT_LEN",
    "max_output_len": "REQUEST_OUTPUT_LEN",
}

# Inputs of an encoder to the output of the tokenizer that each takes.
TOKENS_OF_ENCODER = {"input_ids": "input_ids", "sequence_length": "request_input_len"}


def postprocessing(model: ModelSignature) -> ModelSignature:
    """Return postprocessing with the types in which `model` sends tokens and lengths."""
    lengths = model.output("sequence_length").dtype
    tokens = model.output("output_ids").dtype
    return POSTPROCESSING.with_types({"TOKENS_BATCH": tokens, "sequence_length": lengths})


# Our own engine's alone.
CHOICES = ModelSignature(
    (
        _scalar("min_p", "FP32", "added: least likely token, as a share of the likeliest"),
        _scalar(
            "nucleus_include_boundary",
            "BOOL",
            "added: 1: the token at the nucleus boundary keeps its whole mass",
        ),
        _scalar("ignore_eos", "BOOL", "added: no end token ends the sequence"),
        _scalar("structured_output", "BYTES", "added: the form of the answer, as JSON"),
        _scalar(
            "frequency_penalty", "FP32", "added: times a token's count in the answer, off its logit"
        ),
        _optional("logit_bias_ids", "INT32", (-1,), "added: tokens with a bias; -1 pads"),
        _optional("logit_bias", "FP32", (-1,), "added: what their logits get added"),
    )
)
# Our own engine's alone, for models with one answer to a prompt that they repeat.
SCORES = ModelSignature(
    inputs=(
        _scalar("num_log_probs", "UINT32", "added: best tokens to report at places of the answer"),
        _scalar("num_prompt_log_probs", "UINT32", "added: the same of the prompt; 0 to 20"),
    ),
    outputs=(
        _tensor("token_log_probs", "FP32", (-1, -1), "added: (B, 1, S+R): of each token"),
        _tensor("top_token_ids", "UINT32", (-1, -1, -1), "added: (B, 1, S+R, W): best first"),
        _tensor("top_token_log_probs", "FP32", (-1, -1, -1), "added: (B, 1, S+R, W)"),
    ),
)


# Interactive models'.
_SESSION = ModelSignature(
    (
        _scalar("session_len", "UINT32", "tokens the whole session may hold"),
        _scalar("memory_len", "UINT32", "tokens kept in the circular cache"),
    )
)


def ensemble(model: ModelSignature, *, keeps_sessions: bool = False) -> ModelSignature:
    """Return the text-in, text-out signature around a generation model.

    One that `keeps_sessions` has the shapes of `interactive`; texts get them here.
    """
    text = with_leading_axis(_ENSEMBLE_TEXT) if keeps_sessions else _ENSEMBLE_TEXT
    options = tuple(
        replace(tensor, reshape=None)
        for tensor in model.inputs
        if tensor.name not in FROM_TEXT and tensor not in SCORES.inputs
    )
    shared = ("sequence_length", "cum_log_probs", "output_log_probs")
    return text + ModelSignature(options, tuple(map(model.output, shared)))


def text_encoder(model: ModelSignature) -> ModelSignature:
    """Return the signature of an encoder that takes text: its own, with texts in place of ids."""
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
    """Return the signature of an interactive model: every shape gains a leading axis of size 1."""
    return with_leading_axis(model + _SESSION)


def with_leading_axis(model: ModelSignature) -> ModelSignature:
    """Return a signature in which every shape has a leading axis, of size 1 on the wire."""

    def with_axis(tensor: TensorSignature) -> TensorSignature:
        reshape = None if tensor.reshape is None else (-1, *tensor.reshape)
        return replace(tensor, dims=(-1, *tensor.dims), reshape=reshape, ragged=False)

    return model.each(with_axis)


def model_signature(model_type: str, *, data_type: str) -> ModelSignature:
    """Return the signature of a model with the computation type, such as fp16, filled in.

    Common clients cannot send BF16 tensors, so a bf16 model accepts FP32 prompt tables.
    """
    kind = data_type.upper()
    prompts = "FP32" if kind == "BF16" else kind

    def computed(tensor: TensorSignature) -> TensorSignature:
        dtype = prompts if tensor is _PROMPT_EMBEDDING else kind
        return replace(tensor, dtype=dtype) if tensor.dtype == DATA_TYPE else tensor

    return MODEL_SIGNATURES[model_type].each(computed)


def hidden_states(model_type: str) -> tuple[str, ...]:
    """Return the names of an encoder's inputs and outputs in the type that it computes in.

    Empty for models that generate tokens, and for unknown ones.
    """
    if model_type not in ENCODERS:
        return ()
    model = MODEL_SIGNATURES[model_type]
    return tuple(t.name for t in (*model.inputs, *model.outputs) if t.dtype == DATA_TYPE)


# Their C++ models send lengths as INT32, whatever a repository declares. Triton's ensembles compare
# the type that arrives with the declared one and refuse another.
_SIGNED_LENGTHS = ("GPT", "GPT-J")


def as_sent_by_fastertransformer(model: ModelSignature, model_type: str) -> ModelSignature:
    """Return a model's signature with the types that NVIDIA's C++ backend sends."""
    return model.with_types({"sequence_length": "INT32"} if model_type in _SIGNED_LENGTHS else {})
