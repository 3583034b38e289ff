"""Small requests that show whether a model answers."""

from typing import Any

import numpy as np
from tritonclient.grpc import model_config_pb2

from inference.front.validation import DATATYPES

# A small request has two tokens in and two out: its prompt pass and a decoding step warm the model.
_TOKENS = 2
_SESSION_LEN = "session_len"
_TEXTS = {
    **dict.fromkeys(("INPUT_0", "QUERY", "query", "prompts"), b"Hello"),
    "tasks": b"text_generation",
}
_IDS = "input_ids"
_MAX_LENGTH = "max_length"  # 30 tokens without it
_COUNTS = (
    *("input_lengths", "sequence_length", "sequence_lengths"),
    *("request_output_len", "max_output_len", "INPUT_1", "REQUEST_OUTPUT_LEN"),
    _MAX_LENGTH,
)
_NUMBERS = {
    **dict.fromkeys(_COUNTS, _TOKENS),
    _IDS: 0,  # a token of every vocabulary
    _SESSION_LEN: 64,  # optional in config.pbtxt, and needed all the same
}
_HIDDEN_TYPES = ("FP32", "FP16", "BF16")


def probe_tensors(config: Any, *, hidden: int | None) -> dict[str, np.ndarray[Any, Any]] | None:
    """Return the inputs of a small valid request to a model, whose configuration is a message.

    `hidden` is the width of the hidden states that an encoder may take; without it the result for
    such a model is None.
    """
    needed = (_MAX_LENGTH, _SESSION_LEN) if is_interactive(config) else (_MAX_LENGTH,)
    found = {}
    for each in config.input:
        if each.optional and each.name not in needed:
            continue
        kind = model_config_pb2.DataType.Name(each.data_type).removeprefix("TYPE_")
        dims = [max(size, 1) for size in each.dims]
        value: int | bytes = _NUMBERS.get(each.name, 0 if kind == "BOOL" else 1)
        if kind in _HIDDEN_TYPES and len(dims) > 1:
            if hidden is None:
                return None
            dims[-2:] = [_TOKENS, hidden]
        elif kind == "STRING":
            value = _TEXTS.get(each.name, b"")
        elif each.name == _IDS:
            dims[-1] = _TOKENS
        dtype = DATATYPES[kind.replace("STRING", "BYTES").replace("BF16", "FP32")]
        found[each.name] = np.full([1] * bool(config.max_batch_size) + dims, value, dtype)
    return found


def is_interactive(config: Any) -> bool:
    """Return whether a model's requests belong to sessions, or an ensemble hands them to one."""
    return bool(
        config.HasField("sequence_batching")
        or any(tensor.name == _SESSION_LEN for tensor in config.input)
    )
