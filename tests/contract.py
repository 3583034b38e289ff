"""Requests as tensors of the contract, with the types of its table."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tritonclient.utils import triton_to_np_dtype

from export_scripts.triton.signature import CHOICES, MODEL_SIGNATURES, SCORES, declared
from inference.decoding.request import parse_request
from inference.decoding.rows import GenerationRequest
from inference.engine.engine import Engine

# Models take some of the others' options, too.
_OPTIONS = MODEL_SIGNATURES["GPT"] + CHOICES + SCORES + declared("session")
# The contract's names of a prompt's length and of the number of new tokens.
_LENGTHS = {
    "GPT": ("input_lengths", "request_output_len"),
    "T5": ("sequence_length", "max_output_len"),
    "T5-Encoder": ("sequence_length", ""),
}


def tensors_of(
    prompts: Sequence[Sequence[int]], output_len: Any = None, *, model: str = "GPT", **values: Any
) -> dict[str, Any]:
    """Return the inputs of a request of one row a prompt.

    `output_len` and each of `values` hold one value for all rows or one a row; an array of two
    axes or more is sent as it is.
    """
    rows = len(prompts)
    ids = np.zeros((rows, max(map(len, prompts))), np.uint32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    length, wanted = _LENGTHS[model]
    given = {length: list(map(len, prompts)), wanted: output_len, **values}
    types = {each.name: each.dtype for each in (_OPTIONS + MODEL_SIGNATURES[model]).inputs}
    tensors = {"input_ids": ids}
    for name, value in given.items():
        if isinstance(value, np.ndarray) and value.ndim > 1:
            tensors[name] = value
        elif value is not None:
            column = np.asarray(value, triton_to_np_dtype(types[name])).reshape(-1, 1)
            tensors[name] = np.broadcast_to(column, (rows, 1)).copy()
    return tensors


def request_of(
    engine: Engine, prompts: Sequence[Sequence[int]], output_len: Any = 6, **values: Any
) -> GenerationRequest:
    """Return the request that an engine reads from such inputs."""
    model = "T5" if engine.limits.encoder_decoder else "GPT"
    return parse_request(tensors_of(prompts, output_len, model=model, **values), engine.limits)
