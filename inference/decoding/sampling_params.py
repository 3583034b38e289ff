"""The sampling parameters of a sequence, and how they are read and normalised.

Source: FasterTransformer 5.3, layers/sampling_layers/TopKSamplingLayer.cu,
TopPSamplingLayer.cu (argument set-up) and layers/DynamicDecodeLayer.cc.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inference.decoding.tensor_fields import ANY, TensorFields
from inference.decoding.word_lists import MAX_IDS, TokenIds, Words, read_word_lists

MAX_TOP_K = 1024
DEFAULT_TOP_P_MIN = float(np.float32(1e-6))
MIN_PENALTY = 1e-30  # dividing a logit by less, and by a small temperature, could overflow
MAX_FREQUENCY_PENALTY = 1e20  # a larger sum, divided by a small temperature, could overflow
MAX_BEAM_WIDTH = 64
MAX_LOG_PROBS = 20
BIAS_IDS, BIAS = "logit_bias_ids", "logit_bias"
_SCORES = ("num_log_probs", "num_prompt_log_probs")


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of a sequence; `top_k == 0` selects nucleus sampling, as in FasterTransformer.

    `num_log_probs` and `num_prompt_log_probs` are the numbers of best tokens to report at each
    position of the answer and of the prompt, with the score of the token itself; 0 reports none.
    `whole_boundary` gives the token at the nucleus boundary its whole mass; None takes the model's
    setting.
    """

    end_id: int  # also fills rows up
    other_end_ids: TokenIds = ()
    ignore_eos: bool = False
    start_id: int = 0
    beam_width: int = 1
    top_k: int = 1
    top_p: float = 1.0
    min_p: float = 0.0
    whole_boundary: bool | None = None
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # distinct ids and their biases
    min_length: int = 0
    len_penalty: float = 0.0
    beam_search_diversity_rate: float = 0.0
    top_p_decay: float = 1.0
    top_p_min: float = DEFAULT_TOP_P_MIN
    top_p_reset_id: int = -1
    random_seed: int = 0
    bad_words: Words = ()
    stop_words: Words = ()
    return_log_probs: bool = False
    return_context_cum_log_probs: bool = False
    return_context_embeddings: bool = False
    num_log_probs: int = 0
    num_prompt_log_probs: int = 0

    @property
    def end_ids(self) -> TokenIds:
        """The tokens that end the row."""
        return () if self.ignore_eos else (self.end_id, *self.other_end_ids)

    @property
    def is_greedy(self) -> bool:
        """True when every token is the arg-max, so that random numbers do not matter."""
        return self.beam_width == 1 and (self.top_k == 1 or self.temperature == 0)

    @property
    def is_penalised(self) -> bool:
        """True when ids already seen in the row are penalised."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0

    @property
    def is_biased(self) -> bool:
        """True when biases are added to the logits of some ids."""
        return self.frequency_penalty != 0 or bool(self.logit_bias)

    @property
    def has_marks(self) -> bool:
        """True when some ids are penalised, biased or banned."""
        return self.is_penalised or self.is_biased or bool(self.bad_words)


# Parameters without a tensor of one number per row, and those whose tensors have other names.
_DERIVED = ("other_end_ids", "logit_bias", "bad_words", "stop_words")
_TENSORS = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "whole_boundary": "nucleus_include_boundary",
    "top_p_reset_id": "top_p_reset_ids",
    "return_log_probs": "is_return_log_probs",
    "return_context_cum_log_probs": "is_return_context_cum_log_probs",
    "return_context_embeddings": "is_return_context_embeddings",
}
# Parameter -> tensor; its bounds; parameters that need a value for every row.
_PARAMETERS = {
    each.name: _TENSORS.get(each.name, each.name)
    for each in dataclasses.fields(SamplingParams)
    if each.name not in _DERIVED
}
_WITHIN = {
    **dict.fromkeys(("top_k", "temperature", "min_length"), (0, math.inf)),
    **dict.fromkeys(_SCORES, (0, MAX_LOG_PROBS)),
    "beam_width": (1, MAX_BEAM_WIDTH),
    "min_p": (0, 1),
    "repetition_penalty": (MIN_PENALTY, math.inf),
    "frequency_penalty": (-MAX_FREQUENCY_PENALTY, MAX_FREQUENCY_PENALTY),
}
_PER_ROW = ("start_id", "end_id", "top_p_decay", "top_p_min", "top_p_reset_id")
# All tensors that `read_options` reads.
TENSORS = (*_PARAMETERS.values(), "bad_words_list", "stop_words_list", BIAS_IDS, BIAS)


def normalise_selection(top_k: int, top_p: float) -> tuple[int, float, list[str]]:
    """Return the effective top_k and top_p, and a warning for each value that was clamped."""
    k, p = top_k, float(np.float32(top_p))
    warnings = []
    if k > MAX_TOP_K:
        warnings.append(f"runtime_top_k={k} is clamped to {MAX_TOP_K}")
        k = MAX_TOP_K
    if not 0 <= p <= 1:
        warnings.append(f"runtime_top_p={p:g} is clamped to [0, 1]")
    if p == 0:
        k, p = k or 1, 1.0
    return k, min(max(p, 0.0), 1.0), warnings


def read_options(
    fields: TensorFields, *, start_id: int, end_ids: Sequence[int]
) -> tuple[list[SamplingParams], list[str]]:
    """Return the options of every row and warnings; problems are added to `fields.problems`.

    `end_ids` are the model's; an `end_id` in the request replaces all of them.
    """
    warnings: list[str] = []
    others = () if "end_id" in fields.tensors else tuple(end_ids[1:])
    defaults = {"start_id": start_id, "end_id": end_ids[0], "top_k": 0, "top_p": 0.0}
    columns = {
        name: fields.numbers(
            tensor,
            default=defaults.get(name, getattr(SamplingParams, name, None)),
            within=_WITHIN.get(name, ANY),
            per_row=name in _PER_ROW,
        )
        for name, tensor in _PARAMETERS.items()
    }
    columns["other_end_ids"] = [others] * fields.batch
    columns["bad_words"] = read_word_lists(fields, "bad_words_list", shared=True)
    columns["stop_words"] = read_word_lists(fields, "stop_words_list", shared=False)
    columns["logit_bias"] = _logit_bias(fields)
    if "repetition_penalty" in fields.tensors and "presence_penalty" in fields.tensors:
        fields.problems.append(
            "repetition_penalty and presence_penalty are mutually exclusive; send one of them"
        )
    if len(set(columns["beam_width"])) > 1:
        fields.problems.append("beam_width must be identical for all rows of a request")
    if max(columns["beam_width"]) > 1:
        fields.problems += [
            f"{name} needs beam_width=1; leave one of them out"
            for name in (*_SCORES, "min_p")
            if any(columns[name])
        ]
    rows = []
    for b in range(fields.batch):
        row = {name: values[b] for name, values in columns.items()}
        row["top_k"], row["top_p"], clamped = normalise_selection(row["top_k"], row["top_p"])
        row["random_seed"] %= 2**64
        row["top_p_decay"] = row["top_p_decay"] if 0 < row["top_p_decay"] <= 1 else 1.0
        row["top_p_min"] = row["top_p_min"] if 0 < row["top_p_min"] <= 1 else 0.5
        rows.append(SamplingParams(**row))
        warnings += [f"{text} in row {b}" for text in clamped]
    if any(row.return_context_cum_log_probs and not row.return_log_probs for row in rows):
        warnings.append("is_return_context_cum_log_probs has no effect without is_return_log_probs")
    return rows, warnings


def _logit_bias(fields: TensorFields) -> list[tuple[tuple[int, float], ...]]:
    """Return each row's ids with their biases; negative ids are padding."""
    ids = fields.array(BIAS_IDS, "iu", (fields.batch, -1))
    shape = (fields.batch, -1) if ids is None else ids.shape
    bias = fields.finite(BIAS, *shape)
    if (BIAS_IDS in fields.tensors) != (BIAS in fields.tensors):
        fields.problems.append(f"{BIAS_IDS} and {BIAS} belong together; send both")
    elif ids is not None and ids.size > MAX_IDS:
        fields.problems.append(f"{BIAS_IDS}: {ids.size} ids in all rows; at most {MAX_IDS}")
    elif ids is not None and bias is not None:
        rows = zip(ids.tolist(), bias.tolist(), strict=True)
        return [tuple({i: v for i, v in zip(*row, strict=True) if i >= 0}.items()) for row in rows]
    return [()] * fields.batch
