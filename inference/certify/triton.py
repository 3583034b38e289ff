"""Compare a Triton server's answers to rows of token ids with the source's.

The comparison depends on the served model:

* BERT: hidden states, computed from the source's embeddings of the row.
* T5 encoder: hidden states.
* GPT and T5: a greedy answer. The source reads prompt and answer in one forward pass, so that a
  near tie of two logits does not make the texts diverge. The log probabilities of the answer's
  tokens are compared, and whether each token is the source's most probable.

Errors are relative to the source's largest value (for log probabilities, its largest logit). The
tolerance depends on the types of weights and computation.
"""

# Shapes: S padded prompt, N tokens of the prompt, R tokens of the answer, E hidden

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from tritonclient.utils import InferenceServerException

from inference.certify.activations import (
    EMBEDDING,
    LOGITS,
    OUTPUT,
    ModelInputs,
    Source,
    relative_error,
)
from inference.certify.findings import DIFFERS, Part, Remark, not_computed
from inference.certify.options import CertifySection
from inference.certify.tolerances import tolerance_of
from inference.evaluation.rows import GREEDY_WITH_LOG_PROBS, answers, generation_request, padded
from inference.evaluation.run.served_model import ServedModel, ServedTokenizer
from inference.evaluation.task import EvaluationError, Ids, RequestFailedError, generates
from inference.server.client import TritonClient

_MODEL = "fastertransformer"


class RowDifference(NamedTuple):
    """The difference between the server's answer to one row and the source's.

    `relative` is a share of the source's largest value or logit; `same_tokens` is None for a model
    that generates no tokens.
    """

    relative: float
    same_tokens: bool | None = None


def compare_triton(
    name: str,
    source: Source,
    rows: Sequence[Ids],
    options: CertifySection,
    *,
    types: Iterable[str],
    timeout_s: float,
) -> Part:
    """Send rows to a Triton server, and compare its answers with the source's.

    `types` are those of the folder's stored weights; the server states those of its computation.
    """
    url, model = str(options.endpoint), options.model or _MODEL
    table, findings = [], []
    try:
        with TritonClient(
            url, protocol=options.protocol, timeout_s=timeout_s, credentials=options.credentials
        ) as client:
            limit = options.tolerance or tolerance_of([*types, *_served_types(client, model)])
            served = ServedModel(client, ServedTokenizer(client), model_name=model)
            for size in options.batch_sizes:
                found = [
                    each
                    for first in range(0, len(rows), size)
                    for each in _compare_batch(
                        source, rows[first : first + size], served, options.output_len
                    )
                ]
                table.append({
                    "batch_size": size,
                    "relative": max(each.relative for each in found),
                    "same_tokens": fmean(each.same_tokens is not False for each in found),
                })  # fmt: skip
                bad = [number for number, each in enumerate(found) if not each.relative <= limit]
                if bad:
                    detail = (
                        f"error {found[bad[0]].relative:.2e} of its largest value, {limit:.0e} is "
                        f"allowed; {len(bad)} of {len(rows)} rows differ"
                    )
                    where = f"batch size {size}, row {bad[0]}"
                    findings.append(Remark(DIFFERS, "served answer", where, detail))
    except (EvaluationError, InferenceServerException, OSError) as error:
        return not_computed(name, str(error), url)
    sizes = ", ".join(map(str, options.batch_sizes))
    compared = f"{len(rows)} rows, {source.title} and {url} ({model}), batch sizes {sizes}"
    largest = max(row["relative"] for row in table)
    up_to = [f"served answers within {largest:.2g} of their largest value"] * (largest > 0)
    share = min(row["same_tokens"] for row in table)
    if share < 1:
        up_to.append(f"{share:.0%} of greedy answers the source's own")
    return Part(name, compared, tuple(findings), tuple(up_to), table)


def _served_types(client: TritonClient, model: str) -> list[str]:
    """Return the types of a served model's computation, from its config.pbtxt."""
    stated = client.parameters(model)
    types = [stated["data_type"]] if "data_type" in stated else []
    return [*types, *["int8"] * (stated.get("int8_mode", "0") != "0")]


def _compare_batch(
    source: Source, rows: Sequence[Ids], model: ServedModel, output_len: int
) -> list[RowDifference]:
    """Send rows in one request, and compare each answer.

    Raises:
        RequestFailedError: the server refused, failed or did not answer in time.
    """
    if not generates(model):
        return _compare_states(source, rows, model)
    has_encoder = model.is_encoder_decoder
    request = generation_request(rows, output_len, GREEDY_WITH_LOG_PROBS, has_encoder=has_encoder)
    outputs = model.infer(request, ("output_ids", "sequence_length", "output_log_probs"))
    found = answers(rows, outputs, has_encoder=has_encoder)
    return [
        _compare_answer(source, ids, answer, log_probs[0, : len(answer)])
        for ids, answer, log_probs in zip(rows, found, outputs["output_log_probs"], strict=True)
    ]


def _compare_states(source: Source, rows: Sequence[Ids], model: ServedModel) -> list[RowDifference]:
    """Compare the source's hidden states (N, E) of each row with the server's (S, E)."""
    ids, lengths = padded(rows)
    computed = [source.run(ModelInputs(tuple(row))) for row in rows]
    request = {"input_ids": ids, "sequence_length": lengths}
    if "input_hidden_state" in model.input_names():
        embedded = [each[EMBEDDING] for each in computed]
        states = torch.nn.utils.rnn.pad_sequence(embedded, batch_first=True).numpy()
        request = {"input_hidden_state": states, "sequence_lengths": lengths.astype(np.int32)}
    served = model.infer(request, ("output_hidden_state",))["output_hidden_state"]
    found = []
    for expected, states in zip((each[OUTPUT] for each in computed), served, strict=True):
        unpadded = torch.tensor(np.asarray(states[: len(expected)], np.float32))
        largest = float(expected.abs().max())
        found.append(RowDifference(relative_error(expected, unpadded, largest=largest)))
    return found


def _compare_answer(source: Source, ids: Ids, answer: Ids, log_probs: Any) -> RowDifference:
    if not answer:
        raise RequestFailedError("the server's answer is empty and cannot be compared")
    inputs = ModelInputs((*ids, *answer[:-1]))
    if source.start is not None:
        inputs = ModelInputs(tuple(ids), (source.start, *answer[:-1]))
    logits = source.run(inputs)[LOGITS][-len(answer) :]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).squeeze(1)  # (R,)
    largest = float(logits.abs().max())
    return RowDifference(
        relative_error(wanted, torch.tensor(log_probs), largest=largest),
        same_tokens=logits.argmax(-1).tolist() == list(answer),
    )
