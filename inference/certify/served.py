"""Compare an endpoint's log probabilities with the source's, or with those of a training step."""

import itertools
import json
import math
import pickle
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from foundations.files.yaml_content import read_table
from inference.certify.activations import LOGITS, ModelInputs, Source
from inference.certify.findings import DIFFERS, Part, Remark, not_computed
from inference.certify.layers import SERVED
from inference.certify.options import CertifySection
from inference.certify.triton import compare_triton
from inference.evaluation.openai_client import OpenAIClient, listed_model, prompt_scores
from inference.evaluation.options import OPENAI
from inference.evaluation.task import EvaluationError

# Field names of a training step's row, by what they hold, in the order of the file.
_FIELDS: Mapping[str, Sequence[str]] = read_table(Path(__file__).with_name("training_fields.yaml"))
(
    _TOKENS, _PROMPTS, _ANSWERS, _LOG_PROBS, _MASKS, _LENGTHS, _PADDING, _PROMPT_MASK, _POSITIONS,
) = _FIELDS.values()  # fmt: skip
_PACKED = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_padded")
_PACKED_ERROR = "it holds several sequences, packed one after the other: write each as a row"
_READ = {"input_lengths", *itertools.chain.from_iterable(_FIELDS.values())}
_ROWS = ("samples", "rollout_data")  # keys of a .pt file
_NEGLIGIBLE = 1e-6  # nats
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ScoredRow:
    """Token ids, each with its natural log probability given the ones before; None if unknown.

    `of` is the name of the training step's field; empty for the source's.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float | None, ...]
    of: str = ""


def compare_endpoint(source: Source, options: CertifySection, types: Iterable[str]) -> Part:
    """Send rows of random token ids to the endpoint, and compare its answers with the source's.

    `types` are those of the folder's stored weights.
    """
    rows = _random_rows(source, options)
    if options.protocol != OPENAI:
        return compare_triton(SERVED, source, rows, options, types=types, timeout_s=_TIMEOUT_S)
    first = source.run(ModelInputs(rows[0])) if source.start is None else {}
    if LOGITS not in first:
        return not_computed(SERVED, "OpenAI's protocol gives no log probabilities of such a model")
    known = [_scored(ids, source.run(ModelInputs(ids))[LOGITS]) for ids in rows]
    return compare_served(SERVED, known, source.title, options)


def _random_rows(source: Source, options: CertifySection) -> list[tuple[int, ...]]:
    longest = options.input_len
    if source.positions is not None:
        longest = max(1, min(longest, source.positions - options.output_len))
    shortest = min(longest, options.min_input_len or (longest + 1) // 2)
    draw = random.Random(options.seed)
    lengths = [draw.randint(shortest, longest) for _ in range(options.samples)]
    return [tuple(draw.randrange(source.vocab_size) for _ in range(length)) for length in lengths]


def compare_served(name: str, rows: Sequence[ScoredRow], of: str, options: CertifySection) -> Part:
    """Compare the log probabilities of rows with the endpoint's for the same tokens.

    `of` names where the rows come from: the source's title, or the training file.
    """
    url, tolerance = str(options.endpoint), options.log_prob_tolerance
    client = OpenAIClient(url, options.credentials, timeout_s=_TIMEOUT_S, retry_s=_TIMEOUT_S)
    places = [
        (number, place)
        for number, row in enumerate(rows)
        for place in range(1, len(row.ids))
        if row.log_probs[place] is not None
    ]
    if not places:
        return not_computed(name, "no token has a log probability")
    table = []
    numbers = [*dict.fromkeys(number for number, _ in places)]
    try:
        model = str(listed_model(client, options.model)["id"])
        for size in options.batch_sizes:
            answers = _served_log_probs(client, model, [rows[number] for number in numbers], size)
            found = dict(zip(numbers, answers, strict=True))
            table.append({"batch_size": size, **_difference(rows, found, places, tolerance)})
    except EvaluationError as error:
        return not_computed(name, str(error), url)
    findings = tuple(
        Remark(
            DIFFERS,
            "log probability",
            f"batch size {row['batch_size']}, {row['first']}",
            f"{row['beyond']} of {row['tokens']} tokens beyond {tolerance}",
        )
        for row in table
        if row["beyond"]
    )
    largest = max(row["largest"] for row in table)
    sizes = ", ".join(map(str, options.batch_sizes))
    tokens_of = f"{len(places)} tokens of {len(numbers)} rows"
    if without := len(rows) - len(numbers):
        tokens_of += f" ({without} more have none)"
    fields = " and ".join(sorted({row.of for row in rows} - {""}))
    origin = " of ".join(filter(None, (fields, of)))
    compared = f"{tokens_of}, {origin} and {url} ({model}), batch sizes {sizes}"
    bound = f"log probabilities within {largest:.2g} (mean {table[0]['mean']:.2g})"
    return Part(name, compared, findings, (bound,) if largest > _NEGLIGIBLE else (), table)


def _served_log_probs(
    client: OpenAIClient, model: str, rows: Sequence[ScoredRow], size: int
) -> list[list[float]]:
    """Return the log probabilities of each row's tokens, requested for `size` rows at a time.

    Raises:
        EvaluationError: the endpoint gives no answer or scores, or has read other tokens.
    """
    prompts = [list(row.ids) for row in rows]
    scored_prompt = {"echo": True, "logprobs": 1}
    one = {**client.greedy_request(model, prompts[:1], 1), **scored_prompt}
    return_ids = client.accepted_parameters(one, {"return_token_ids": True})
    found = []
    for first in range(0, len(rows), size):
        batch = prompts[first : first + size]
        body = {**client.greedy_request(model, batch, 1), **scored_prompt, **return_ids}
        for ids, choice in zip(batch, client.complete_with_retries(body)["choices"], strict=True):
            if (read := choice.get("prompt_token_ids") or ids) != ids:
                raise EvaluationError(
                    f"{client.url} was sent token ids {ids[:8]}... and has read {read[:8]}..."
                )
            if (scores := prompt_scores(choice, len(ids))) is None:
                raise EvaluationError(
                    f"{client.url} gives no log probabilities of a prompt's tokens (echo, logprobs)"
                )
            found.append([math.nan, *scores])
    return found


def _difference(
    rows: Sequence[ScoredRow],
    found: Mapping[int, Sequence[float]],
    places: Sequence[tuple[int, int]],
    tolerance: float,
) -> dict[str, Any]:
    """Return statistics of the differences in nats, and the first token beyond the tolerance."""
    wanted = np.array([rows[number].log_probs[place] for number, place in places], np.float64)
    served = np.array([found[number][place] for number, place in places])
    errors = np.abs(served - wanted)
    bad = np.flatnonzero(~(errors <= tolerance))
    first = None
    if bad.size:
        at = int(bad[0])
        number, place = places[at]
        first = (
            f"row {number}, token {place} (id {rows[number].ids[place]}): {served[at]:.4f} served, "
            f"{wanted[at]:.4f} expected"
        )
    return {
        "tokens": len(places),
        "beyond": bad.size,
        "mean": float(errors.mean()),
        "median": float(np.median(errors)),
        "p99": float(np.quantile(errors, 0.99)),
        "largest": float(errors.max()),
        "first": first,
    }


def _scored(ids: tuple[int, ...], logits: torch.Tensor) -> ScoredRow:
    """Return a row with its log probabilities from logits (N, V)."""
    chosen = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return ScoredRow(ids, (None, *chosen.tolist()))


def read_training_rows(path: Path) -> list[ScoredRow]:
    """Read the rows that a training step wrote, as JSON Lines or as a .pt file.

    Each row has its tokens, whole or as prompt and answer, and log probabilities: of all tokens
    (the first one's is not used), or only of the last ones, the answer's.

    Raises:
        ValueError: the file has no rows, or a row has another form.
    """
    rows: list[ScoredRow] = []
    try:
        for row in _read(path):
            rows.append(_row(row))  # noqa: PERF401 - an error says how many were read
    except ValueError as error:
        raise ValueError(f"{path}: row {len(rows)}: {error}") from error
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def _read(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix != ".pt":
        with path.open(encoding="utf-8") as file:
            for line in filter(str.strip, file):
                yield from _unbatched(json.loads(line))
        return
    _allow_nested_tensors()
    try:
        table = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"expected only lists and tensors: {reason}") from error
    fields = table if isinstance(table, Mapping) else {}
    rows = next((fields[name] for name in _ROWS if name in fields), table)
    for row in rows if isinstance(rows, list) else [rows]:
        yield from _unbatched(row)


def _allow_nested_tensors() -> None:
    """Allow verl's jagged nested tensors, which torch.load refuses by default since 2.15."""
    example = torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged)
    rebuild, kind, *_ = example.__reduce_ex__(2)[1]  # type: ignore[no-untyped-call]
    torch.serialization.add_safe_globals([rebuild, kind])


def _plain(value: Any) -> Any:
    """Return a tensor, or a list of them, as numbers in lists."""
    if isinstance(value, torch.Tensor) and not value.is_nested:
        return value.tolist()
    return [*map(_plain, value)] if isinstance(value, list | torch.Tensor) else value


def _unbatched(table: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a table: itself, or one for each entry of its fields (a batch)."""
    if not isinstance(table, Mapping):
        raise ValueError(f"a row is {type(table).__name__}; expected an object with its fields")
    if not table.keys().isdisjoint(_PACKED):
        raise ValueError(_PACKED_ERROR)
    fields = {name: _plain(value) for name, value in table.items() if name in _READ}
    tokens: Any = next((fields[name] for name in (*_TOKENS, *_ANSWERS) if name in fields), None)
    if not tokens or not isinstance(tokens[0], list):
        yield fields
        return
    counts = {name: len(value) for name, value in fields.items() if isinstance(value, list)}
    if wrong := [f"{name} has {count}" for name, count in counts.items() if count != len(tokens)]:
        raise ValueError(f"{', '.join(wrong)} rows; expected {len(tokens)}, as many as of tokens")
    for number in range(len(tokens)):
        yield {name: fields[name][number] for name in counts}


def _values(row: Mapping[str, Any], names: Iterable[str], kind: Any) -> Any:
    """Return a row's first field of some names, checked against a type; None without one."""
    name = next((name for name in names if row.get(name) is not None), None)
    try:
        return None if name is None else TypeAdapter(kind).validate_python(row[name])
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{name}: {first['msg']}, not {first['input']!r:.40}") from error


def _row(row: Mapping[str, Any]) -> ScoredRow:
    ids, prompt, answer = (
        _values(row, names, list[NonNegativeInt]) for names in (_TOKENS, _PROMPTS, _ANSWERS)
    )
    mask, padding, prompt_mask = (
        _values(row, names, list[float]) for names in (_MASKS, _PADDING, _PROMPT_MASK)
    )
    positions = _values(row, _POSITIONS, list[Any])
    if positions and isinstance(positions[0], list):  # vision-language models: three of each token
        positions = None
    if padding is None and prompt_mask is not None and mask is not None:
        padding = [*prompt_mask, *mask]
    present = [name for name in _LOG_PROBS if row.get(name) is not None]
    # NeMo-RL writes zeros if it does not compute them (loss_fn.force_on_policy_ratio).
    of = next((name for name in present if any(row[name])), next(iter(present), ""))
    log_probs = _values(row, (of,), list[float | None])
    if ids is None and answer is not None:
        ids = [*(prompt or ()), *answer]
    if ids is None or row.keys().isdisjoint(_LOG_PROBS):
        wanted = f"{', '.join(_TOKENS)} with one of {', '.join(_LOG_PROBS)}"
        raise ValueError(f"it has {', '.join(row) or 'no such field'}; expected one of {wanted}")
    answer_len = _values(row, _LENGTHS, NonNegativeInt)
    count = answer_len if log_probs is None else len(log_probs)
    if answer_len is not None and count not in (answer_len, len(ids)):
        raise ValueError(
            f"it has {count} log probabilities for the {answer_len} tokens of its answer; expected "
            "the whole row, not the slice of a rank of context parallelism"
        )
    scores, used, real, places = (
        _aligned(() if values is None else values, len(ids), filler)
        for values, filler in ((log_probs, None), (mask, True), (padding, True), (positions, 0))
    )
    length = _values(row, ("input_lengths",), NonNegativeInt)  # NeMo-RL pads rows at their end
    columns = [*zip(ids, scores, used, places, real, strict=True)][:length]
    tokens = [column for column in columns if column[-1]]
    if any(later[3] < earlier[3] for earlier, later in itertools.pairwise(tokens)):
        raise ValueError(_PACKED_ERROR)
    known = tuple(score if is_used else None for _, score, is_used, *_ in tokens)
    return ScoredRow(tuple(token for token, *_ in tokens), known, of)


def _aligned(values: Sequence[Any], count: int, filler: Any) -> list[Any]:
    """Return a value for each of `count` tokens; fewer values belong to the last tokens.

    Raises:
        ValueError: there are more values than tokens.
    """
    if len(values) > count:
        raise ValueError(f"it has {len(values)} values for {count} tokens")
    return [filler] * (count - len(values)) + [*values]
