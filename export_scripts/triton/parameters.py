"""Parameters of a served model's config.pbtxt that Slipway's own engine reads: one table.

The engine reads them by it, a repository is refused by it before it is built, and docs/engine.md
shows it. To add a parameter, add a row, and where it is an option of the engine a field of the same
name to `inference.engine.options.EngineOptions`.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foundations.suggest import did_you_mean

_DAYS_30_S = 30 * 24 * 3600.0
# Most tokens of a sequence unless max_seq_len says otherwise; of an encoder, attention grows with
# their square.
DEFAULT_MAX_SEQ_LEN = 4096


@dataclass(frozen=True)
class Kind:
    """The values of a parameter: a description, and what reads its text or raises ValueError."""

    words: str
    value: Callable[[str], Any]
    allows: Callable[[Any], bool] = lambda _: True  # whether a value is one of them

    def read(self, text: str) -> Any:
        """Return the value. Raises ValueError with what was expected."""
        with contextlib.suppress(ValueError):
            if self.allows(value := self.value(text)):
                return value
        raise ValueError(f"must be {self.words}")


@dataclass(frozen=True)
class Parameter:
    """One parameter."""

    kind: Kind
    # Its value when it is missing, as config.pbtxt would say it; in words where it depends on the
    # model or the machine, and REQUIRED where the engine does not start without it.
    default: str
    meaning: str  # for docs and messages
    configured_by: str = ""  # key of the configuration that sets it, where there is one


def whole(low: int, high: int) -> Kind:
    """A whole number within a range, in digits alone."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 20):
            raise ValueError(text)
        return int(text)

    return Kind(f"a whole number from {low} to {high}", read, lambda n: low <= n <= high)


def seconds(high: float = _DAYS_30_S) -> Kind:
    """A positive time."""
    words = f"a number of seconds above 0, at most {high:.0f}"
    return Kind(words, float, lambda value: 0 < value <= high)


def one_of(*choices: str) -> Kind:
    """One of a few words."""
    words = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    return Kind(words, str, choices.__contains__)


FLAG = Kind("0 or 1", lambda text: ("0", "1").index(text) == 1)
TOKEN_ID = whole(0, (1 << 31) - 1)
TOKEN_IDS = Kind(
    "token ids with commas between them",
    lambda text: tuple(TOKEN_ID.read(each.strip()) for each in text.split(",")),
)
TEXT = Kind("a text", str)
REQUIRED = "required"
_OF_MODEL, _OF_TRITON = "export.model.", "export.triton_deployment."

PARAMETERS: Mapping[str, Parameter] = {
    "tensor_para_size": Parameter(
        whole(1, 4096),
        REQUIRED,
        "ranks that share each layer",
        f"{_OF_MODEL}tensor_model_parallel_size",
    ),
    "pipeline_para_size": Parameter(
        whole(1, 4096), REQUIRED, "groups of layers", f"{_OF_TRITON}pipeline_model_parallel_size"
    ),
    "data_type": Parameter(
        one_of("fp32", "fp16", "bf16"), REQUIRED, "type of computation", f"{_OF_TRITON}data_type"
    ),
    "is_half": Parameter(
        FLAG,
        "-",
        "where older files have no data_type: 1 is fp16, 0 is fp32",
        f"{_OF_TRITON}data_type",
    ),
    "model_type": Parameter(TEXT, "GPT", "must be that of the weights", f"{_OF_TRITON}model_type"),
    "model_checkpoint_path": Parameter(TEXT, "<version>/<TP>-gpu", "folder of the weights"),
    "device": Parameter(
        one_of("auto", "cpu", "cuda"), "auto", "auto: CUDA where there is a device"
    ),
    "int8_mode": Parameter(
        whole(0, 2), "0", "1 keeps matrices in 8 bits, see below", f"{_OF_TRITON}int8_mode"
    ),
    "fp8": Parameter(FLAG, "0", "1 computes matrix products in FP8, see below"),
    "batch_invariant": Parameter(
        FLAG, "0", "1: to the bit, answers do not depend on other requests; refused on a CPU"
    ),
    "max_lanes": Parameter(
        whole(1, 65536), "64 on CPU, 512 on CUDA", "most sequences that run at once"
    ),
    "max_seq_len": Parameter(
        whole(1, 1 << 20),
        "the model's own, at most 4096",
        "tokens of a sequence, prompt and answer",
    ),
    "kv_cache_bytes": Parameter(
        whole(1, 1 << 50), "a share of what is free", "memory for keys and values on each rank"
    ),
    "kv_cache_dtype": Parameter(
        one_of("auto", "fp8_e4m3"), "auto", "type of keys and values; auto: that of computation"
    ),
    "kv_block_tokens": Parameter(
        whole(0, 1 << 20),
        "64 on CUDA, 0 on CPU",
        "tokens of a block, 0 for blocks of whole sequences",
    ),
    "share_prefixes": Parameter(FLAG, "1", "0: every prompt is computed whole"),
    "max_queued_rows": Parameter(whole(1, 1 << 31), "2048", "sequences that may wait"),
    "max_stall_s": Parameter(seconds(3600), "0.25", "how much longer a step may take for prompts"),
    "threads": Parameter(whole(1, 4096), "cores / ranks", "of the CPU, for each rank"),
    "shared_memory": Parameter(FLAG, "1", "0: the CPU ranks of a node talk over gloo"),
    "rank_timeout_s": Parameter(seconds(), "7", "a rank that is silent for longer counts as hung"),
    "start_timeout_s": Parameter(seconds(), "1800", "time for the other ranks to load"),
    "output_log_probs_mode": Parameter(
        one_of("renormalized", "full"),
        "renormalized",
        "full: over the whole vocabulary, also with top-k",
    ),
    "nucleus_include_boundary": Parameter(
        FLAG, "0", "1: the token at the nucleus boundary keeps its whole mass"
    ),
    "end_ids": Parameter(
        TOKEN_IDS,
        "those of the weights' config.ini and generation_config.json",
        "tokens that end a sequence whose request states no `end_id`",
    ),
    "strict_lengths": Parameter(
        FLAG, "0", "1: `sequence_length` counts a sequence's own prompt, not the padded one"
    ),
    "stream_new_tokens": Parameter(FLAG, "0", "1: a frame's `output_ids` holds new tokens only"),
    "is_remove_padding": Parameter(
        FLAG, "0, exported as 1", "NVIDIA's backend only: ours computes true tokens alone"
    ),
    "enable_custom_all_reduce": Parameter(
        FLAG, "0", "NVIDIA's backend only", f"{_OF_TRITON}enable_custom_all_reduce"
    ),
    "is_sparse": Parameter(one_of("0"), "0", "NVIDIA's backend only"),
}
# Those that are fields of records under another name.
FIELDS = {"tensor_para_size": "tp_size", "pipeline_para_size": "pp_size"}


def parameter_problems(given: Mapping[str, str]) -> dict[str, str]:
    """Return the problems of parameters that a user adds to config.pbtxt, by their names."""
    found = {}
    for name, text in given.items():
        if (parameter := PARAMETERS.get(name)) is None:
            hint = did_you_mean(name, PARAMETERS)
            found[name] = f"is unknown{hint}; known parameters: {', '.join(PARAMETERS)}."
        elif parameter.configured_by:
            found[name] = f"is set by {parameter.configured_by}; set that instead."
        else:
            try:
                parameter.kind.read(text)
            except ValueError as error:
                found[name] = f"{error} ({parameter.meaning})."
    return found
