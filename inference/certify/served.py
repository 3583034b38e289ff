"""Log probabilities of a running endpoint against those of the source, or of a training step."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inference.certify.findings import DIFFERS, Part, Remark, not_computed
from inference.certify.options import CertifySection
from inference.evaluation.openai_client import OpenAIClient, listed_model
from inference.evaluation.task import EvaluationError
from inference.front.access import Credentials

# Spellings of the tokens of a row, and of the log probabilities that training computed: our own,
# then those of NeMo-RL (train_data_step*.jsonl), slime (--save-debug-train-data and
# --save-debug-rollout-data) and verl (its batch).
_TOKENS = ("token_ids", "tokens", "input_ids")
_ANSWERS = ("response_ids", "responses")
_PROMPTS = ("prompt_ids", "prompts")
_LOG_PROBS = ("logprobs", "log_probs", "prev_logprobs", "old_log_probs", "generation_logprobs",
              "rollout_log_probs")  # fmt: skip
_MASKS = ("token_loss_mask", "loss_mask", "response_mask")
_ROWS = ("samples", "rollout_data")  # of a .pt file
_SAME = 1e-6
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ScoredRow:
    """Tokens, and the natural log probability of each after those before it; NaN: not known."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]


def compare_served(name: str, rows: Sequence[ScoredRow], of: str, options: CertifySection) -> Part:
    """Compare the log probabilities of rows with the endpoint's for the same tokens.

    `of` says whose the rows' are.
    """
    url, tolerance = str(options.endpoint), options.log_prob_tolerance
    tokens = None if options.token_file is None else Path(options.token_file)
    client = OpenAIClient(
        url, Credentials(token_file=tokens), timeout_s=_TIMEOUT_S, retry_s=_TIMEOUT_S
    )
    table, findings = [], []
    try:
        model = str(listed_model(client, options.model)["id"])
        for size in options.batch_sizes:
            found = [
                each
                for first in range(0, len(rows), size)
                for each in _asked(client, model, rows[first : first + size])
            ]
            row = _difference(rows, found, tolerance)
            table.append({"batch_size": size, **row})
            if row["beyond"]:
                words = f"{row['beyond']} of {row['tokens']} tokens beyond {tolerance}"
                where = f"batch size {size}, {row['first']}"
                findings.append(Remark(DIFFERS, "log probability", where, words))
    except EvaluationError as error:
        return not_computed(name, str(error), url)
    if not table or not table[0]["tokens"]:
        return not_computed(name, "no token has a log probability")
    largest = max(row["largest"] for row in table)
    sizes = ", ".join(map(str, options.batch_sizes))
    tokens_of = f"{table[0]['tokens']} tokens of {len(rows)} rows"
    compared = f"{tokens_of}, {of} and {url} ({model}), batch sizes {sizes}"
    bound = f"log probabilities within {largest:.2g} (mean {table[0]['mean']:.2g})"
    return Part(name, compared, tuple(findings), (bound,) if largest > _SAME else (), table)


def _asked(client: OpenAIClient, model: str, rows: Sequence[ScoredRow]) -> Iterator[list[float]]:
    """Yield the log probabilities of each row's tokens, the first of which has none.

    Raises:
        EvaluationError: the endpoint does not answer, or gives other tokens' or none.
    """
    body = {**client.asking(model, [list(row.ids) for row in rows], 1), "echo": True, "logprobs": 1}
    for row, choice in zip(rows, client.patient(body)["choices"], strict=True):
        scores = (choice.get("logprobs") or {}).get("token_logprobs") or []
        own = [math.nan if score is None else float(score) for score in scores[: len(row.ids)]]
        if len(own) < len(row.ids) or any(map(math.isnan, own[1:])):
            raise EvaluationError(
                f"{client.url} gives no log probabilities of a prompt's tokens (echo, logprobs)"
            )
        yield own


def _difference(
    rows: Sequence[ScoredRow], found: Sequence[Sequence[float]], tolerance: float
) -> dict[str, Any]:
    """Return the distribution of the differences, and the first token beyond the tolerance."""
    errors, first = [], None
    for number, (row, own) in enumerate(zip(rows, found, strict=True)):
        wanted, served = np.array(row.log_probs[1:]), np.array(own[1:])
        known = ~np.isnan(wanted)
        error = np.abs(served - wanted)
        errors.append(error[known])
        if first is None and (bad := np.flatnonzero(known & ~(error <= tolerance))).size:
            at = int(bad[0])
            first = (
                f"row {number}, token {at + 1} (id {row.ids[at + 1]}): {served[at]:.4f} served, "
                f"{wanted[at]:.4f} expected"
            )
    every = np.concatenate(errors) if errors else np.empty(0)
    if not every.size:
        return {"tokens": 0, "beyond": 0, "largest": 0.0, "mean": 0.0, "first": None}
    return {
        "tokens": int(every.size),
        "beyond": int((~(every <= tolerance)).sum()),
        "mean": float(every.mean()),
        "median": float(np.median(every)),
        "p99": float(np.quantile(every, 0.99)),
        "largest": float(every.max()),
        "first": first,
    }


def scored(ids: tuple[int, ...], logits: torch.Tensor) -> ScoredRow:
    """Return a row with the log probabilities of logits (N, V)."""
    chosen = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return ScoredRow(ids, (math.nan, *chosen.tolist()))


def read_training_rows(path: Path) -> list[ScoredRow]:
    """Return the rows of a file that a training step wrote: JSON Lines, or slime's .pt.

    Each row has its tokens, whole or as prompt and answer, and the log probabilities of all of
    them (that of the first is not used), or of the last ones, the answer's.

    Raises:
        ValueError: the file has other rows.
    """
    rows = [_row(row, f"{path}: row {number}") for number, row in enumerate(_read(path))]
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def _read(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".pt":
        table = torch.load(path, map_location="cpu", weights_only=True)
        own = next((table[name] for name in _ROWS if name in table), table)
        if isinstance(own, list):
            yield from own
        else:  # a list for each field
            fields = {name: each for name, each in own.items() if isinstance(each, list)}
            for values in zip(*fields.values(), strict=True):
                yield dict(zip(fields, values, strict=True))
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def _row(row: Mapping[str, Any], where: str) -> ScoredRow:
    def field(names: Sequence[str], kind: Callable[[Any], Any]) -> list[Any] | None:
        value = next((row[name] for name in names if row.get(name) is not None), None)
        return None if value is None else [kind(each) for each in value]

    ids, answer = field(_TOKENS, int), field(_ANSWERS, int)
    log_probs, mask = field(_LOG_PROBS, float), field(_MASKS, bool)
    if ids is None and answer is not None:
        ids = [*(field(_PROMPTS, int) or []), *answer]
    if ids is None or log_probs is None:
        wanted = f"{', '.join(_TOKENS)} with one of {', '.join(_LOG_PROBS)}"
        raise ValueError(f"{where} has {', '.join(row)}; expected one of {wanted}")
    ids = ids[: row.get("input_lengths", len(ids))]  # of NeMo-RL, whose rows are padded
    if len(log_probs) > len(ids):
        log_probs = log_probs[: len(ids)]
    missing = len(ids) - len(log_probs)
    known = [math.nan] * missing + log_probs
    if mask is not None:
        mask = mask[: len(ids)]
        used = [True] * (len(ids) - len(mask)) + mask
        known = [value if use else math.nan for value, use in zip(known, used, strict=True)]
    return ScoredRow(tuple(ids), tuple(known))
