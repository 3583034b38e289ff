"""A generation request: from the tensors of the serving contract to checked, normalised rows.

All problems of a request are reported together; each message starts with the tensor's name.
"""

# Shapes: B rows, S padded prompt length, W width of a word list

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from inference.decoding.grammars import MOST_GRAMMAR_BYTES, Constraint
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
from inference.decoding.sampling_params import BIAS, BIAS_IDS, read_options
from inference.decoding.tensor_fields import Array, TensorFields

STRUCTURE = "structured_output"
# A request's virtual prompts: the tasks of loaded tables, or tables and soft prompts sent along.
TASK_IDS = "prompt_learning_task_name_ids"
EMBEDDING, LENGTHS, TYPE = (
    "request_prompt_embedding",
    "request_prompt_lengths",
    "request_prompt_type",
)


_COMMON = f"""
    runtime_top_k runtime_top_p beam_search_diversity_rate temperature len_penalty
    repetition_penalty presence_penalty frequency_penalty {BIAS_IDS} {BIAS} min_length random_seed
    is_return_log_probs beam_width start_id end_id bad_words_list stop_words_list {TASK_IDS}
    top_p_decay top_p_min top_p_reset_ids {EMBEDDING} {LENGTHS} ia3_tasks
    min_p nucleus_include_boundary ignore_eos {STRUCTURE}
""".split()
_OF_DECODERS = f"""
    {TYPE} session_len memory_len is_return_context_cum_log_probs is_return_context_embeddings
    num_log_probs num_prompt_log_probs
""".split()


def parse_request(tensors: Mapping[str, Array], limits: ModelLimits) -> GenerationRequest:
    """Return the checked request of tensors by their contract's names, rows first.

    Raises:
        RequestError: with every problem found.
    """
    return _Parser(tensors, limits).parse()


def read_batch(
    tensors: Mapping[str, Array],
    required: Sequence[str],
    optional: Sequence[str] = (),
    *,
    kinds: str = "iu",
    expected: str = "integers of shape [B,S]",
    hidden: tuple[int, ...] = (),
) -> tuple[Array, TensorFields]:
    """Return the first of the required tensors, (B, S, *hidden), and the fields of all.

    Raises:
        RequestError: It is missing, or of another shape or type, or a name is unknown.
    """
    value = tensors.get(required[0])
    fields = TensorFields(tensors, 1 if value is None or not value.ndim else len(value))
    fields.check_names(required, optional)
    if value is None:
        raise RequestError(fields.problems)
    is_batch = value.ndim == 2 + len(hidden) and len(value) and value.shape[2:] == hidden
    if not is_batch or value.dtype.kind not in kinds:
        got = f"{value.dtype} {list(value.shape)}"
        raise RequestError([*fields.problems, f"{required[0]}: expected {expected}, got {got}"])
    return value, fields


class _Parser:
    def __init__(self, tensors: Mapping[str, Array], limits: ModelLimits) -> None:
        self.limits = limits
        names, optional = ("input_lengths", "request_output_len"), [*_COMMON, *_OF_DECODERS]
        if limits.encoder_decoder:
            names, optional = ("sequence_length", "max_output_len"), _COMMON
        lengths_name, self.output_len = names
        ids, self.fields = read_batch(tensors, ("input_ids", *names), optional)
        self.problems, self.width = self.fields.problems, ids.shape[1]
        lengths = self.fields.lengths(
            lengths_name, width=self.width, may_be_empty=not limits.encoder_decoder
        )
        rows = zip(ids.astype(np.int64), lengths, strict=True)
        self.inputs = [tuple(row[:length].tolist()) for row, length in rows]
        self.output_lens = self.fields.numbers(self.output_len, default=1, within=(1, math.inf))
        self.options, self.warnings = read_options(
            self.fields, start_id=limits.start_id, end_ids=limits.end_ids
        )
        self.prompts = _read_prompts(self.fields, limits)
        self.before = [prompt.cached_len if prompt else 0 for prompt in self.prompts]

    def parse(self) -> GenerationRequest:
        self.problems += [
            f"num_prompt_log_probs[{b}]={row.num_prompt_log_probs}: a prompt with virtual tokens "
            "is not scored token by token; leave one of them out"
            for b, row in enumerate(self.options)
            if row.num_prompt_log_probs and self.prompts[b] is not None
        ]
        ia3_tasks = self.fields.ia3_tasks(self.limits.ia3_num_tasks)
        session_len, memory_len = self._session()
        self._check_special_ids()
        self._check_room()
        for b, (ids, prompt) in enumerate(zip(self.inputs, self.prompts, strict=True)):
            self._check_ids(b, ids, prompt)
        constraints = self._constraints()
        if self.problems:
            raise RequestError(self.problems)
        return GenerationRequest(
            rows=tuple(
                replace(self._row(b, task), constraint=constraints[b])
                for b, task in enumerate(ia3_tasks)
            ),
            padded_len=self.width,
            encoder_decoder=self.limits.encoder_decoder,
            session_len=session_len,
            memory_len=memory_len,
            warnings=tuple(self.warnings),
        )

    def _session(self) -> tuple[int | None, int | None]:
        sizes: dict[str, int | None] = {"session_len": None, "memory_len": None}
        for name in sizes:
            if name in self.fields.tensors:
                values = self.fields.numbers(name, default=0)
                sizes[name] = values[0]
                if len(set(values)) > 1:
                    self.problems.append(f"{name} must be identical for all rows of a request")
        session_len, memory_len = sizes["session_len"], sizes["memory_len"]
        # An empty prompt is the start id.
        prompt_len, longest = max(self.width, 1) + max(self.before), max(self.output_lens)
        if session_len is not None and prompt_len + longest > session_len:
            self.problems.append(
                f"session_len: Session size too low ({session_len}): prompt ({prompt_len}) + "
                f"{self.output_len} ({longest}) must fit"
            )
        if memory_len is not None and prompt_len > memory_len:
            self.problems.append(
                f"memory_len: Memory size too low ({memory_len}): prompt ({prompt_len}) must fit"
            )
        return session_len, memory_len

    def _constraints(self) -> list[Constraint | None]:
        """Return the form that each row's answer must have; other problems come first."""
        value, grammars = self.fields.tensors.get(STRUCTURE), self.limits.grammars
        found: list[Constraint | None] = [None] * self.fields.batch
        if value is None or self.problems:
            return found
        if grammars is None or self.options[0].beam_width > 1:
            reason = "needs beam_width=1" if grammars else "this model has no tokenizer"
            self.problems.append(f"{STRUCTURE}: {reason}")
        elif value.dtype.kind not in "OS" or value.size != len(found):
            self.problems.append(f"{STRUCTURE}: expected BYTES of shape [{len(found)},1]")
        elif max(map(len, value.reshape(-1))) > MOST_GRAMMAR_BYTES:
            self.problems.append(f"{STRUCTURE}: {MOST_GRAMMAR_BYTES} bytes at most")
        else:
            for b, text in enumerate(value.reshape(-1)):
                try:
                    found[b] = grammars.constraint(bytes(text).decode()) if text else None
                except ValueError as error:  # noqa: PERF203 - one problem each
                    self.problems.append(f"{STRUCTURE}[{b}]: {error}")
        return found

    def _check_special_ids(self) -> None:
        """Check ids that the request states, and a model's start id where it is fed."""
        for b, row in enumerate(self.options):
            largest = max((token for token, _ in row.logit_bias), default=0)
            if largest >= self.limits.vocab_size:
                self.problems.append(
                    f"{BIAS_IDS}[{b}]: {largest} outside vocabulary of size "
                    f"{self.limits.vocab_size}"
                )
        checked = set(self.fields.tensors)
        if self.limits.encoder_decoder or self.width == 0:
            checked.add("start_id")
        for name in ("start_id", "end_id"):
            for b, row in enumerate(self.options):
                value = getattr(row, name)
                if name in checked and not 0 <= value < self.limits.vocab_size:
                    self.problems.append(
                        f"{name}[{b}]={value} outside vocabulary of size {self.limits.vocab_size}"
                    )

    def _check_room(self) -> None:
        """Check the position table and that a virtual prompt has a context pass to act in."""
        width, limit = self.width, self.limits.max_pos_seq_len
        if width <= 1 and not self.limits.encoder_decoder and any(self.prompts):
            source = EMBEDDING if EMBEDDING in self.fields.tensors else TASK_IDS
            self.problems.append(
                f"{source}: a virtual prompt needs at least 2 tokens in input_ids, got {width}"
            )
        if limit is None:
            return
        if self.limits.encoder_decoder:
            for name, size in (("input_ids", width), (self.output_len, max(self.output_lens))):
                if size > limit:
                    self.problems.append(f"{name}: {size} exceeds max_pos_seq_len ({limit})")
            return
        needs = map(sum, zip(self.before, self.output_lens, strict=True))
        need, b = max((need, b) for b, need in enumerate(needs))
        if width + need > limit:
            self.problems.append(
                f"input_ids: prompt ({width + self.before[b]}) + {self.output_len} "
                f"({self.output_lens[b]}) exceeds max_pos_seq_len ({limit})"
            )

    def _check_ids(self, b: int, ids: tuple[int, ...], prompt: PromptTable | None) -> None:
        vocab_size = self.limits.vocab_size
        real, virtual = range(vocab_size), range(0)
        if prompt is not None and prompt.kind == P_TUNING:
            # From the first virtual id on every id is looked up in the table.
            real = range(min(vocab_size, prompt.start_id))
            virtual = range(prompt.start_id, prompt.start_id + prompt.length)
        bad = [t for t, i in enumerate(ids) if i not in real and i not in virtual]
        if bad:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            table = f" and virtual ids {virtual.start} to {virtual.stop - 1}" if virtual else ""
            self.problems.append(
                f"input_ids[{b},{bad[0]}]={ids[bad[0]]} outside vocabulary of size "
                f"{vocab_size}{table}{more}"
            )

    def _row(self, b: int, ia3_task: int | None) -> SequenceRequest:
        ids, options, prompt = self.inputs[b], self.options[b], self.prompts[b]
        start = (options.start_id,)
        returned = ids
        if prompt is not None and prompt.kind == P_TUNING:
            returned = tuple(i for i in ids if i < prompt.start_id)
        return SequenceRequest(
            input_ids=ids or start,
            output_len=self.output_lens[b],
            options=options,
            context_ids=start if self.limits.encoder_decoder else ids or start,
            returned_ids=() if self.limits.encoder_decoder else returned,
            prompt=prompt,
            ia3_task=ia3_task,
        )


def _read_prompts(fields: TensorFields, limits: ModelLimits) -> list[PromptTable | None]:
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
    for b, task_id in enumerate(fields.numbers(TASK_IDS, default=0)):
        length = limits.prompt_lengths.get(task_id)
        if length is None:
            fields.problems.append(f"{TASK_IDS}[{b}]={task_id} is unknown; loaded tasks: {known}")
            tables.append(None)
        else:
            tables.append(PromptTable(kind, length, limits.virtual_start_id, task_id=task_id))
    return tables


def _sent_prompts(fields: TensorFields, limits: ModelLimits) -> list[PromptTable | None]:
    embedding = _embedding(fields, limits)
    lengths = fields.numbers(LENGTHS, default=0)
    kinds = [P_TUNING] * fields.batch
    if not limits.encoder_decoder:
        kinds = fields.numbers(TYPE, default=NO_PROMPT)
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
        row = embedding[b, :length]  # (length, hidden)
        table = PromptTable(kind, length, limits.virtual_start_id, embedding=row)
        tables.append(None if kind == NO_PROMPT or length <= 0 else table)
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
