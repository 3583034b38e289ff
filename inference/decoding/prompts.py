"""Virtual prompts of a request: loaded tables by task id, tables and soft prompts sent along."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from inference.decoding.rows import (
    NO_PROMPT,
    P_TUNING,
    PREFIX_PROMPT,
    SOFT_PROMPT,
    ModelLimits,
    PromptTable,
)
from inference.decoding.tensor_fields import Array, TensorFields

TASK_IDS = "prompt_learning_task_name_ids"
EMBEDDING, LENGTHS, TYPE = (
    "request_prompt_embedding",
    "request_prompt_lengths",
    "request_prompt_type",
)


def read_prompts(fields: TensorFields, limits: ModelLimits) -> list[PromptTable | None]:
    """Return the virtual prompt of every row; problems go to `fields.problems`."""
    wanted = (EMBEDDING, LENGTHS) if limits.encoder_decoder else (EMBEDDING, LENGTHS, TYPE)
    present = [name for name in wanted if name in fields.tensors]
    if len(present) == len(wanted):
        return _sent_prompts(fields, limits)
    if present:
        missing = ", ".join(name for name in wanted if name not in present)
        fields.problems.append(
            f"{present[0]}: a prompt in the request needs {', '.join(wanted)}; missing: {missing}"
        )
        return [None] * fields.batch
    if TASK_IDS in fields.tensors:
        return _loaded_prompts(fields, limits)
    return [None] * fields.batch


def _loaded_prompts(fields: TensorFields, limits: ModelLimits) -> list[PromptTable | None]:
    kind = limits.prompt_learning_type
    if kind not in ((P_TUNING,) if limits.encoder_decoder else (PREFIX_PROMPT, P_TUNING)):
        fields.problems.append(
            f"{TASK_IDS}: this model has no loaded prompts (prompt_learning_type={kind}); "
            "omit the tensor"
        )
        return [None] * fields.batch
    known = ", ".join(map(str, sorted(limits.prompt_lengths))) or "none"
    tables: list[PromptTable | None] = []
    for b, task_id in enumerate(fields.integers(TASK_IDS, default=0)):
        length = limits.prompt_lengths.get(task_id)
        if length is None:
            fields.problems.append(f"{TASK_IDS}[{b}]={task_id} is unknown; loaded tasks: {known}")
            tables.append(None)
        else:
            tables.append(PromptTable(kind, length, limits.virtual_start_id, task_id=task_id))
    return tables


def _sent_prompts(fields: TensorFields, limits: ModelLimits) -> list[PromptTable | None]:
    embedding = _embedding(fields, limits)
    lengths = fields.integers(LENGTHS, default=0)
    kinds = [P_TUNING] * fields.batch
    if not limits.encoder_decoder:
        kinds = fields.integers(TYPE, default=NO_PROMPT)
    for b, kind in enumerate(kinds if TYPE in fields.tensors else ()):
        if kind not in (NO_PROMPT, SOFT_PROMPT, P_TUNING):
            fields.problems.append(f"{TYPE}[{b}]={kind} must be one of 0, 1, 3 for this model")
    if embedding is None:
        return [None] * fields.batch
    tables: list[PromptTable | None] = []
    for b, (kind, length) in enumerate(zip(kinds, lengths, strict=True)):
        if not 0 <= length <= embedding.shape[1]:
            fields.problems.append(
                f"{LENGTHS}[{b}]={length} must be in [0, {embedding.shape[1]}], "
                f"the second size of {EMBEDDING}"
            )
        if kind == NO_PROMPT or length <= 0:
            tables.append(None)
        else:
            row = embedding[b, :length]  # (length, hidden)
            tables.append(PromptTable(kind, length, limits.virtual_start_id, embedding=row))
    return tables


def _embedding(fields: TensorFields, limits: ModelLimits) -> Array | None:
    """Return (B, P, hidden) fp32; half and single precision are both accepted."""
    value = fields.tensors[EMBEDDING]
    expected = (fields.batch, limits.hidden_units)
    if value.ndim != 3 or (value.shape[0], value.shape[2]) != expected:
        fields.problems.append(
            f"{EMBEDDING}: expected shape [{expected[0]},P,{expected[1]}], got {list(value.shape)}"
        )
        return None
    if value.dtype.kind != "f":
        fields.problems.append(f"{EMBEDDING}: expected FP16 or FP32, got {value.dtype}")
        return None
    with np.errstate(over="ignore"):  # what fp32 cannot hold is not finite
        value = value.astype(np.float32)
    if not np.isfinite(value).all():
        fields.problems.append(f"{EMBEDDING}: holds values that are not finite")
        return None
    return value


def prompt_source(tensors: Mapping[str, Array]) -> str:
    """Return the tensor a virtual prompt came from, to name it in messages."""
    return EMBEDDING if EMBEDDING in tensors else TASK_IDS
