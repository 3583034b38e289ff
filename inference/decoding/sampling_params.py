"""The sampling parameters of a sequence in normalised form, and the rules that normalise them.

Source: FasterTransformer 5.3, layers/sampling_layers/TopKSamplingLayer.cu,
TopPSamplingLayer.cu (argument set-up) and layers/DynamicDecodeLayer.cc.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inference.decoding.tensor_fields import ANY, Range, TensorFields
from inference.decoding.word_lists import MOST_IDS, Words, read_word_lists

MAX_TOP_K = 1024
DEFAULT_TOP_P_MIN = 1e-6
LEAST_PENALTY = 1e-30  # a logit divided by less, and by a small temperature, may overflow
MOST_FREQUENCY_PENALTY = 1e20  # a sum of more, divided by a small temperature, may overflow
MAX_BEAM_WIDTH = 64
MAX_LOG_PROBS = 20
BIAS_IDS, BIAS = "logit_bias_ids", "logit_bias"
_SCORES = ("num_log_probs", "num_prompt_log_probs")
# The tensors of numbers that are options as they are, with the least and the largest value.
_RANGES: dict[str, Range] = {
    "beam_width": (1, MAX_BEAM_WIDTH),
    "random_seed": ANY,
    "min_length": (0, math.inf),
    "len_penalty": ANY,
    "beam_search_diversity_rate": ANY,
    "num_log_probs": (0, MAX_LOG_PROBS),
    "num_prompt_log_probs": (0, MAX_LOG_PROBS),
    "temperature": (0, math.inf),
    "repetition_penalty": (LEAST_PENALTY, math.inf),
    "presence_penalty": ANY,
    "frequency_penalty": (-MOST_FREQUENCY_PENALTY, MOST_FREQUENCY_PENALTY),
    "min_p": (0, 1),
    "top_p_decay": ANY,
    "top_p_min": ANY,
}
_FLAGS = {
    "ignore_eos": "ignore_eos",
    "return_log_probs": "is_return_log_probs",
    "return_context_cum_log_probs": "is_return_context_cum_log_probs",
    "return_context_embeddings": "is_return_context_embeddings",
}


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of a sequence; `top_k == 0` selects the nucleus path, as in FasterTransformer.

    `num_log_probs` and `num_prompt_log_probs` are the best tokens to report at each place of the
    answer and of the prompt, next to the score of the token that is there; 0 scores nothing.
    `whole_boundary` gives the token at the nucleus boundary its whole mass; None leaves that to
    the model's settings.
    """

    end_id: int  # it fills rows up, too
    other_end_ids: tuple[int, ...] = ()
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
    logit_bias: tuple[tuple[int, float], ...] = ()  # ids, each once, and what is added
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
    def end_ids(self) -> tuple[int, ...]:
        """The tokens at which the row ends by itself."""
        return () if self.ignore_eos else (self.end_id, *self.other_end_ids)

    @property
    def is_greedy(self) -> bool:
        """True when every token is the arg-max, so no random number can matter."""
        return self.beam_width == 1 and (self.top_k == 1 or self.temperature == 0)

    @property
    def is_penalised(self) -> bool:
        """True when the ids that a row has seen are penalised."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0

    @property
    def is_biased(self) -> bool:
        """True when something is added to the logits of some ids."""
        return self.frequency_penalty != 0 or bool(self.logit_bias)

    @property
    def has_marks(self) -> bool:
        """True when a rule holds for some ids and not for others."""
        return self.is_penalised or self.is_biased or bool(self.bad_words)


def normalise_selection(top_k: int, top_p: float) -> tuple[int, float, list[str]]:
    """Return the effective (top_k, top_p) and a warning for each value that was clamped."""
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
    """Return the options of every row and the warnings; problems go to `fields.problems`.

    `end_ids` are the model's; a request that states an `end_id` ends there alone.
    """
    warnings: list[str] = []
    others = () if "end_id" in fields.tensors else tuple(end_ids[1:])
    columns: dict[str, list[Any]] = {
        "start_id": fields.numbers("start_id", default=start_id, per_row=True),
        "end_id": fields.numbers("end_id", default=end_ids[0], per_row=True),
        "other_end_ids": [others] * fields.batch,
        "bad_words": read_word_lists(fields, "bad_words_list", shared=True),
        "stop_words": read_word_lists(fields, "stop_words_list", shared=False),
        "logit_bias": _logit_bias(fields),
        "whole_boundary": _whole_boundary(fields),
        "top_p_reset_id": fields.numbers("top_p_reset_ids", default=-1, per_row=True),
        **{name: fields.flags(tensor) for name, tensor in _FLAGS.items()},
        **_selection_columns(fields, warnings),
    }
    for name, within in _RANGES.items():
        default = getattr(SamplingParams, name)
        per_row = name in ("top_p_decay", "top_p_min")
        columns[name] = fields.numbers(name, default=default, within=within, per_row=per_row)
    columns["random_seed"] = [seed % 2**64 for seed in columns["random_seed"]]
    columns["top_p_decay"] = [value if 0 < value <= 1 else 1.0 for value in columns["top_p_decay"]]
    columns["top_p_min"] = [
        float(np.float32(value)) if 0 < value <= 1 else 0.5 for value in columns["top_p_min"]
    ]
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
    pairs = zip(columns["return_context_cum_log_probs"], columns["return_log_probs"], strict=True)
    if any(context and not scored for context, scored in pairs):
        warnings.append("is_return_context_cum_log_probs has no effect without is_return_log_probs")
    rows = [
        SamplingParams(**{name: values[b] for name, values in columns.items()})
        for b in range(fields.batch)
    ]
    return rows, warnings


def _whole_boundary(fields: TensorFields) -> list[bool] | list[None]:
    name = "nucleus_include_boundary"
    return fields.flags(name) if name in fields.tensors else [None] * fields.batch


def _logit_bias(fields: TensorFields) -> list[tuple[tuple[int, float], ...]]:
    """Return each row's ids with their biases; a negative id pads a row."""
    nothing: list[tuple[tuple[int, float], ...]] = [()] * fields.batch
    ids, bias = (fields.tensors.get(name) for name in (BIAS_IDS, BIAS))
    if ids is None and bias is None:
        return nothing
    if ids is None or bias is None:
        fields.problems.append(f"{BIAS_IDS} and {BIAS} belong together; send both")
        return nothing
    if ids.ndim != 2 or len(ids) != fields.batch or bias.shape != ids.shape:
        fields.problems.append(
            f"{BIAS_IDS}, {BIAS}: expected shape [{fields.batch},W] of both, got "
            f"{list(ids.shape)} and {list(bias.shape)}"
        )
    elif ids.dtype.kind not in "iu" or bias.dtype.kind != "f":
        fields.problems.append(
            f"{BIAS_IDS}, {BIAS}: expected INT32 and FP32, got {ids.dtype} and {bias.dtype}"
        )
    elif ids.size > MOST_IDS:
        fields.problems.append(f"{BIAS_IDS}: {ids.size} ids; {MOST_IDS} in all rows at most")
    elif not np.isfinite(bias).all():
        fields.problems.append(f"{BIAS}: holds values that are not finite")
    else:
        rows = zip(ids.tolist(), bias.astype(np.float32).tolist(), strict=True)
        return [tuple({i: v for i, v in zip(*row, strict=True) if i >= 0}.items()) for row in rows]
    return nothing


def _selection_columns(fields: TensorFields, warnings: list[str]) -> dict[str, list[Any]]:
    counts = fields.numbers("runtime_top_k", default=0, within=(0, math.inf))
    masses = fields.numbers("runtime_top_p", default=0.0)
    rows = [normalise_selection(*row) for row in zip(counts, masses, strict=True)]
    for b, (_, _, clamped) in enumerate(rows):
        warnings.extend(f"{text} in row {b}" for text in clamped)
    return {"top_k": [k for k, _, _ in rows], "top_p": [p for _, p, _ in rows]}
