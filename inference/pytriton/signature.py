"""Inputs and outputs of a text model that PyTriton serves.

Those of the FasterTransformer example in PyTriton's documentation, and `sequence_tokens`.
"""

from __future__ import annotations

from export_scripts.triton.signature import TensorSignature

MAX_BATCH_SIZE = 128

INPUTS = (
    TensorSignature("prompts", "BYTES", (1,), doc="texts to continue"),
    TensorSignature("request_output_len", "UINT32", (1,), doc="new tokens, for each row"),
    TensorSignature("beam_width", "UINT32", (1,), optional=True, doc="texts for each prompt"),
)
OUTPUTS = (
    TensorSignature("sentences", "BYTES", (-1, 1), doc="prompt and answer, best first"),
    TensorSignature("sequence_length", "INT64", (-1,), doc="characters of each sentence"),
    TensorSignature("cum_log_probs", "FP32", (-1,), doc="of each answer"),
    TensorSignature("sequence_tokens", "INT64", (-1,), doc="tokens of prompt and answer"),
)
