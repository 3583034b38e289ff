"""Parsing of generation requests: from tensors of the serving contract to checked rows.

All problems of a request are reported together; each message starts with the tensor's name.
"""

# Shapes: B rows, S padded prompt length, W width of a word list

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from inference.decoding.grammars import MAX_GRAMMAR_BYTES, Constraint
from inference.decoding.rows import (
    NO_PROMPT,
    P_TUNING,
    PREFIX_PROMPT,
    SOFT_PROMPT,
    GenerationRequest,
    ModelLimits,
    PromptTable,
    RequestError,
    SequenceRequest,
)
from inference.decoding.sampling_params import BIAS_IDS, TENSORS, read_options
from inference.decoding.tensor_fields import Array, TensorFields

STRUCTURE = "structured_output"
# Tensors of virtual prompts: task ids of loaded tables, or tables and soft prompts in the request.
TASK_IDS = "prompt_learning_task_name_ids"
EMBEDDING, LENGTHS, TYPE = (
    "request_prompt_embedding",
    "request_prompt_lengths",
    "request_prompt_type",
)
_COMMON = {*TENSORS, STRUCTURE, TASK_IDS, EMBEDDING, LENGTHS, "ia3_tasks"}
_DECODER_ONLY = {TYPE, "session_len", "memory_len"}
# Outputs that an encoder-decoder does not offer.
_SCORES = {
    "is_return_context_cum_log_probs",
    "is_return_context_embeddings",
    "num_log_probs",
    "num_prompt_log_probs",
}


def parse_request(tensors: Mapping[str, Array], limits: ModelLimits) -> GenerationRequest:
    """Return the checked request, from tensors by name with rows as their first axis.

    Raises:
        RequestError: With every problem found.
    """
    if limits.encoder_decoder:
        lengths_name, output_name = "sequence_length", "max_output_len"
        optional = _COMMON - _SCORES
    else:
        lengths_name, output_name = "input_lengths", "request_output_len"
        optional = _COMMON | _DECODER_ONLY
    ids, fields = read_batch(tensors, ("input_ids", lengths_name, output_name), optional)
    width = ids.shape[1]
    lengths = fields.lengths(lengths_name, width=width, may_be_empty=not limits.encoder_decoder)
    output_lens = fields.numbers(output_name, default=1, within=(1, math.inf))
    options, warnings = read_options(fields, start_id=limits.start_id, end_ids=limits.end_ids)
    prompts, tasks = _read_prompts(fields, limits), fields.ia3_tasks(limits.ia3_num_tasks)
    stated = {*tensors}
    if limits.encoder_decoder or width == 0:  # its value is fed to the model
        stated.add("start_id")
    rows = []
    for b, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        sent, start = tuple(ids[b, :length].tolist()), (options[b].start_id,)
        returned = sent
        if prompt is not None and prompt.kind == P_TUNING:
            returned = tuple(i for i in sent if i < prompt.start_id)
        row = SequenceRequest(
            input_ids=sent or start,
            output_len=output_lens[b],
            options=options[b],
            context_ids=start if limits.encoder_decoder else sent or start,
            returned_ids=() if limits.encoder_decoder else returned,
            prompt=prompt,
            ia3_task=tasks[b],
        )
        rows.append(row)
        fields.problems += unknown_ids(b, sent, limits.vocab_size, prompt)
        fields.problems += _row_problems(b, row, limits, stated)
    sizes = {name: fields.common(name) for name in ("session_len", "memory_len")}
    if width <= 1 and not limits.encoder_decoder and any(prompts):
        source = EMBEDDING if EMBEDDING in tensors else TASK_IDS
        fields.problems.append(
            f"{source}: a virtual prompt needs at least 2 tokens in input_ids, got {width}"
        )
    constraints = [] if fields.problems else _constraints(fields, limits, options[0].beam_width)
    if fields.problems:
        raise RequestError(fields.problems)
    return GenerationRequest(
        rows=tuple(
            replace(row, constraint=constraint)
            for row, constraint in zip(rows, constraints, strict=True)
        ),
        padded_len=width,
        encoder_decoder=limits.encoder_decoder,
        warnings=tuple(warnings),
        **sizes,
    )


def read_batch(
    tensors: Mapping[str, Array],
    required: Sequence[str],
    optional: Collection[str] = (),
    *,
    kinds: str = "iu",
    hidden: tuple[int, ...] = (),
) -> tuple[Array, TensorFields]:
    """Return the first required tensor, (B, S, *hidden), and a reader of all tensors.

    Raises:
        RequestError: The first is missing or has another shape or type, with all other problems.
    """
    value = tensors.get(required[0])
    fields = TensorFields(tensors, 1 if value is None or not value.ndim else max(len(value), 1))
    fields.check_names(required, optional)
    value = fields.array(required[0], kinds, (fields.batch, -1, *hidden))
    if value is None:
        raise RequestError(fields.problems)
    return value, fields


def unknown_ids(
    b: int, ids: Sequence[int], vocab_size: int, prompt: PromptTable | None = None
) -> list[str]:
    """Return at most one problem: a row's `input_ids` outside vocabulary and prompt table."""
    real, virtual = range(vocab_size), range(0)
    if prompt is not None and prompt.kind == P_TUNING:
        # Ids from the first virtual one on are looked up in the table.
        real = range(min(vocab_size, prompt.start_id))
        virtual = range(prompt.start_id, prompt.start_id + prompt.length)
    bad = [t for t, i in enumerate(ids) if i not in real and i not in virtual]
    if not bad:
        return []
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    table = f" and virtual ids {virtual.start} to {virtual.stop - 1}" if virtual else ""
    known = f"vocabulary of size {vocab_size}{table}"
    return [f"input_ids[{b},{bad[0]}]={ids[bad[0]]} outside {known}{more}"]


def _row_problems(
    b: int, row: SequenceRequest, limits: ModelLimits, stated: Collection[str]
) -> list[str]:
    """Return the problems of a row's options; `stated` names the tensors whose values are used."""
    options, vocab_size = row.options, limits.vocab_size
    biased = max((token for token, _ in options.logit_bias), default=0)
    ids = {BIAS_IDS: biased, "start_id": options.start_id, "end_id": options.end_id}
    problems = [
        f"{name}[{b}]={token} outside vocabulary of size {vocab_size}"
        for name, token in ids.items()
        if name in stated and not 0 <= token < vocab_size
    ]
    if options.num_prompt_log_probs and row.prompt is not None:
        problems.append(
            f"num_prompt_log_probs[{b}]={options.num_prompt_log_probs}: a prompt with virtual "
            "tokens is not scored token by token; leave one of them out"
        )
    return problems


def _constraints(
    fields: TensorFields, limits: ModelLimits, beam_width: int
) -> list[Constraint | None]:
    """Return the constraint on each row's answer; problems are added to `fields.problems`."""
    grammars, found = limits.grammars, list[Constraint | None]()
    texts = fields.array(STRUCTURE, "OS", (fields.batch, 1), (fields.batch,))
    if texts is None:
        return [None] * fields.batch
    if grammars is None or beam_width > 1:
        reason = "needs beam_width=1" if grammars else "this model has no tokenizer"
        fields.problems.append(f"{STRUCTURE}: {reason}")
        return []
    for b, text in enumerate(texts.reshape(-1).tolist()):
        try:
            if len(text) > MAX_GRAMMAR_BYTES:
                raise ValueError(f"{len(text)} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
            found.append(grammars.constraint(bytes(text).decode()) if text else None)
        except ValueError as error:  # noqa: PERF203 - one problem each
            fields.problems.append(f"{STRUCTURE}[{b}]: {error}")
    return found


def _read_prompts(fields: TensorFields, limits: ModelLimits) -> list[PromptTable | None]:
    """Return the virtual prompt of every row; problems are added to `fields.problems`."""
    wanted = (EMBEDDING, LENGTHS) if limits.encoder_decoder else (EMBEDDING, LENGTHS, TYPE)
    missing = [name for name in wanted if name not in fields.tensors]
    if not missing:
        return _sent_prompts(fields, limits)
    if len(missing) < len(wanted):
        fields.problems.append(
            f"a prompt in the request needs {', '.join(wanted)}; missing: {', '.join(missing)}"
        )
    elif TASK_IDS in fields.tensors:
        return _loaded_prompts(fields, limits)
    return [None] * fields.batch


def _loaded_prompts(fields: TensorFields, limits: ModelLimits) -> list[PromptTable | None]:
    kind, lengths, start = (
        limits.prompt_learning_type, limits.prompt_lengths, limits.virtual_start_id
    )  # fmt: skip
    if kind not in ((P_TUNING,) if limits.encoder_decoder else (PREFIX_PROMPT, P_TUNING)):
        fields.problems.append(
            f"{TASK_IDS}: this model has no loaded prompts (prompt_learning_type={kind}); "
            "omit the tensor"
        )
        return [None] * fields.batch
    tasks = fields.numbers(TASK_IDS, default=0)
    known = ", ".join(map(str, sorted(lengths))) or "none"
    fields.problems += [
        f"{TASK_IDS}[{b}]={task} is unknown; loaded tasks: {known}"
        for b, task in enumerate(tasks)
        if task not in lengths
    ]
    return [
        PromptTable(kind, lengths[task], start, task_id=task) if task in lengths else None
        for task in tasks
    ]


def _sent_prompts(fields: TensorFields, limits: ModelLimits) -> list[PromptTable | None]:
    embedding = fields.finite(EMBEDDING, fields.batch, -1, limits.hidden_units)  # (B, P, hidden)
    most = 0 if embedding is None else embedding.shape[1]
    kinds = [P_TUNING] * fields.batch
    if not limits.encoder_decoder:
        kinds = fields.numbers(TYPE, default=NO_PROMPT)
    fields.problems += [
        f"{TYPE}[{b}]={kind} must be one of 0, 1, 3 for this model"
        for b, kind in enumerate(kinds)
        if kind not in (NO_PROMPT, SOFT_PROMPT, P_TUNING)
    ]
    if embedding is None:
        return [None] * fields.batch
    lengths = fields.numbers(LENGTHS, default=0, within=(0, most))
    return [
        PromptTable(kind, length, limits.virtual_start_id, embedding=rows[:length])
        if kind != NO_PROMPT and length > 0
        else None
        for kind, length, rows in zip(kinds, lengths, embedding, strict=True)
    ]
