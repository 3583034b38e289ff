"""Inputs and outputs of a text model that PyTriton serves, as its examples have them.

INPUTS and OUTPUTS are those of the FasterTransformer example, and `sequence_tokens`; those of NEMO
are of the NeMo example (examples/nemo_megatron_gpt_multinode), whose names and types follow NeMo's
LengthParam, SamplingParam and OutputType. NEMO_DEPLOY_INPUTS are what the two query classes of
nemo/deploy/nlp/query_llm.py send.
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


def _optional(name: str, dtype: str, dims: tuple[int, ...] = (1,), *, doc: str) -> TensorSignature:
    return TensorSignature(name, dtype, dims, optional=True, doc=doc)


def _lengths(dtype: str, most: str, least: str) -> tuple[TensorSignature, ...]:
    return (
        _optional(most, dtype, doc="new tokens"),
        _optional(least, dtype, doc="before the end token"),
    )


def _sampling(whole: str) -> tuple[TensorSignature, ...]:
    return (
        _optional("use_greedy", "BOOL", doc="the likeliest token always"),
        _optional("temperature", "FP32", doc="divides the logits"),
        _optional("top_k", whole, doc="0: any number of candidates"),
        _optional("top_p", "FP32", doc="probability to sample from"),
        _optional("repetition_penalty", "FP32", doc="1 is neutral"),
        _optional("add_BOS", "BOOL", doc="put the start token in front"),
        _optional("all_probs", "BOOL", doc="must be false"),
        _optional("compute_logprob", "BOOL", doc="fill logprob"),
    )


NEMO_INPUTS = (
    TensorSignature("tasks", "BYTES", (1,), doc="text_generation, or the name of a prompt table"),
    TensorSignature("prompts", "BYTES", (1,), doc="texts to continue"),
    *_lengths("INT32", "max_length", "min_length"),
    *_sampling("INT32"),
    _optional("end_strings", "BYTES", (1, -1), doc="texts that end an answer"),
)
NEMO_DEPLOY_INPUTS = (
    TensorSignature("prompts", "BYTES", (1,), doc="texts to continue"),
    _optional("task_id", "BYTES", doc="the name of a prompt table"),
    *_lengths("INT64", "max_length", "min_length"),
    *_lengths("INT64", "max_output_len", "min_output_len"),
    *_sampling("INT64"),
    _optional("random_seed", "INT64", doc="of sampling"),
    _optional("end_strings", "BYTES", (-1,), doc="texts that end an answer"),
    _optional("stop_words_list", "BYTES", (-1,), doc="the same"),
    _optional("bad_words_list", "BYTES", (-1,), doc="texts that no answer has"),
    _optional("no_repeat_ngram_size", "FP32", doc="must be 0"),
)
NEMO_OUTPUTS = (
    TensorSignature("sentences", "BYTES", (1,), doc="prompt and answer"),
    TensorSignature("tokens", "BYTES", (1, -1), doc="text of each token"),
    TensorSignature("token_ids", "INT32", (1, -1), doc="of prompt and answer"),
    TensorSignature("logprob", "FP32", (1, -1), doc="of each token but the first, else NaN"),
    TensorSignature("offsets", "INT32", (1, -1), doc="characters before each token"),
)
