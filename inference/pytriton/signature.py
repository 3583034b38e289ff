"""Inputs and outputs of a text model that PyTriton serves, as its examples have them.

INPUTS and OUTPUTS are those of the FasterTransformer example, and `sequence_tokens`; those of NEMO
are of the NeMo example (examples/nemo_megatron_gpt_multinode), whose names and types follow NeMo's
LengthParam, SamplingParam and OutputType.
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

NEMO_INPUTS = (
    TensorSignature("tasks", "BYTES", (1,), doc="text_generation"),
    TensorSignature("prompts", "BYTES", (1,), doc="texts to continue"),
    TensorSignature("max_length", "INT32", (1,), optional=True, doc="new tokens"),
    TensorSignature("min_length", "INT32", (1,), optional=True, doc="before the end token"),
    TensorSignature("use_greedy", "BOOL", (1,), optional=True, doc="the likeliest token always"),
    TensorSignature("temperature", "FP32", (1,), optional=True, doc="divides the logits"),
    TensorSignature("top_k", "INT32", (1,), optional=True, doc="0: any number of candidates"),
    TensorSignature("top_p", "FP32", (1,), optional=True, doc="probability to sample from"),
    TensorSignature("repetition_penalty", "FP32", (1,), optional=True, doc="1 is neutral"),
    TensorSignature("add_BOS", "BOOL", (1,), optional=True, doc="put the start token in front"),
    TensorSignature("all_probs", "BOOL", (1,), optional=True, doc="must be false"),
    TensorSignature("compute_logprob", "BOOL", (1,), optional=True, doc="must be false"),
    TensorSignature("end_strings", "BYTES", (1, -1), optional=True, doc="texts that end an answer"),
)
NEMO_OUTPUTS = (
    TensorSignature("sentences", "BYTES", (1,), doc="prompt and answer"),
    TensorSignature("tokens", "BYTES", (1, -1), doc="text of each token"),
    TensorSignature("token_ids", "INT32", (1, -1), doc="of prompt and answer"),
)
