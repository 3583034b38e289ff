"""Probes: the smallest valid request to a model, which shows whether it answers."""

import numpy as np

from inference.backend.requests import Array
from inference.front.validation import DATATYPES
from inference.host.models import HostedModel

# Two tokens in and two out: prefill and a decode step both run, and warm the model up.
_TOKENS = 2
_SESSION_LEN = "session_len"
_TEXTS = {
    **dict.fromkeys(("INPUT_0", "QUERY", "query", "prompts"), b"Hello"),
    "tasks": b"text_generation",
}
_IDS = "input_ids"
_MAX_LENGTH = "max_length"  # optional, but its default of 30 tokens is too long for a probe
_COUNTS = (
    *("input_lengths", "sequence_length", "sequence_lengths"),
    *("request_output_len", "max_output_len", "INPUT_1", "REQUEST_OUTPUT_LEN"),
    _MAX_LENGTH,
)
_NUMBERS = {
    **dict.fromkeys(_COUNTS, _TOKENS),
    _IDS: 0,  # exists in every vocabulary
    _SESSION_LEN: 64,  # optional in config.pbtxt, but required by interactive models
}
_HIDDEN_TYPES = ("FP32", "FP16", "BF16")


def probe_tensors(model: HostedModel, *, hidden: int | None) -> dict[str, Array] | None:
    """Return the inputs of a probe for a model.

    `hidden` is the width of the hidden states that an encoder may take as input; the result is None
    for such a model if it is unknown.
    """
    needed = (_MAX_LENGTH, _SESSION_LEN) if is_interactive(model) else (_MAX_LENGTH,)
    found = {}
    for tensor in model.inputs.values():
        if tensor.optional and tensor.name not in needed:
            continue
        kind, _ = model.forms[tensor.name]
        dims = [max(size, 1) for size in tensor.dims]
        value: int | bytes = _NUMBERS.get(tensor.name, 0 if kind == "BOOL" else 1)
        if kind in _HIDDEN_TYPES and len(dims) > 1:
            if hidden is None:
                return None
            dims[-2:] = [_TOKENS, hidden]
        elif kind == "BYTES":
            value = _TEXTS.get(tensor.name, b"")
        elif tensor.name == _IDS:
            dims[-1] = _TOKENS
        dtype = DATATYPES["FP32" if kind == "BF16" else kind]
        found[tensor.name] = np.full([1] * bool(model.config.max_batch_size) + dims, value, dtype)
    return found


def is_interactive(model: HostedModel) -> bool:
    """Return whether requests belong to sessions, of the model or of an ensemble's step."""
    return model.keeps_sessions or _SESSION_LEN in model.inputs
