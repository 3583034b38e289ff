"""Sampled rows: rules in their order, reasons to stop, scores, and draws by the reference rule."""

from typing import Any

import numpy as np
import pytest
import torch

from inference.decoding.answer import UNUSABLE
from inference.decoding.candidates import select
from inference.decoding.draws import ARG_MAX, Xorwow
from inference.decoding.rows import SequenceRequest, SequenceResult
from inference.decoding.sampler import Sampler
from inference.decoding.sampling import _draw_from_all
from inference.decoding.sampling_params import SamplingParams

VOCAB = 52
END = 51


def request(
    *, context: tuple[int, ...] = (3, 4), output_len: int = 4, **options: Any
) -> SequenceRequest:
    return SequenceRequest(
        *(context, output_len, SamplingParams(**{"end_id": END, **options}), context),
        returned_ids=context,
    )


def favouring(*tokens: int, by: float = 9.0) -> torch.Tensor:
    """Return (1, VOCAB) logits with the first token best, then the second, ..."""
    logits = torch.zeros(1, VOCAB)
    for rank, token in enumerate(tokens):
        logits[0, token] = by - rank
    return logits


def run(row: SequenceRequest, *logits: torch.Tensor, **config: Any) -> SequenceResult:
    sampler = Sampler(VOCAB, **config)
    decoded = sampler.begin(row)
    for step_logits in logits:
        sampler.step([decoded], step_logits)
        if decoded.is_finished:
            break
    return decoded.result()


# Options, the likeliest tokens of each step, the answer, and why it ended.
ENDS: list[tuple[dict[str, Any], list[tuple[int, ...]], tuple[int, ...], str | None]] = [
    ({"output_len": 3}, [(7,)] * 5, (7, 7, 7), "length"),
    ({}, [(7,), (END,), (8,)], (7, END), "end"),
    ({}, [(7,)], (7,), None),
    ({"stop_words": ((4, 7),)}, [(7,), (8,)], (7,), "stop"),  # it begins in the prompt
    ({"stop_words": ((3, 4),), "output_len": 1}, [(7,)], (7,), "length"),
    ({"stop_words": ((END,),)}, [(END,)], (END,), "end"),
    ({"other_end_ids": (7, 9)}, [(8,), (9,)], (8, 9), "end"),
    ({"other_end_ids": (7, 9), "top_k": 4}, [(8,), (9,)], (8, 9), "end"),
    *(
        ({"other_end_ids": (7,), "min_length": 1, **each}, [(END, 7, 8), (7,)], (8, 7), "end")
        for each in ({}, {"top_k": 4}, {"frequency_penalty": 0.1})
    ),
    (
        {"other_end_ids": (7,), "ignore_eos": True, "min_length": 1, "output_len": 3},
        [(END,), (7,), (8,)],
        (END, 7, 8),
        "length",
    ),
    ({"min_length": 2, "stop_words": ((8,),)}, [(END, 7), (END, 8)], (7, 8), "stop"),
    ({"end_id": VOCAB + 60, "min_length": 2}, [(7,), (8,)], (7, 8), None),
    ({"bad_words": ((4, 7), (8, 9))}, [(7, 8), (9, 7), (9, 7)], (8, 7, 9), None),
    ({"bad_words": ((0,),)}, [(0,)], (0,), None),  # id 0 cannot be banned
    ({"bad_words": ((VOCAB,), (VOCAB + 60,), (3, VOCAB))}, [(7,)], (7,), None),
    # A prompt of one token is not penalised, and virtual tokens never are.
    ({"context": (7,), "repetition_penalty": 80.0}, [(7, 8), (7, 8)], (7, 8), None),
    ({"context": (VOCAB + 5, 7), "repetition_penalty": 2.0}, [(7, 8)], (8,), None),
]


@pytest.mark.parametrize(("options", "steps", "tokens", "reason"), ENDS)
def test_a_row_obeys_its_rules_and_ends(options, steps, tokens, reason):
    result = run(request(**options), *(favouring(*step, by=60.0) for step in steps))
    assert (result.output_ids, result.finish_reasons) == ((tokens,), (reason,))


def test_minimum_length_of_a_model_without_an_end_id_bars_no_token():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    best = int(logits.argmax())
    for selection in ({}, {"repetition_penalty": 1.5}, {"beam_width": 2}):
        row = SequenceRequest(
            (3, 4), 1, SamplingParams(end_id=-1, min_length=2, **selection), (3, 4)
        )
        assert run(row, logits.repeat(row.options.beam_width, 1)).output_ids[0] == (best,)


def test_padded_vocabulary_is_never_chosen():
    logits = torch.nn.functional.pad(favouring(7), (0, 12), value=99.0)
    assert run(request(), logits).output_ids == ((7,),)
    assert run(request(top_k=4), logits).output_ids[0][0] < VOCAB


def test_logits_are_left_as_they_are():
    logits = favouring(7)
    before = logits.clone()
    run(request(temperature=0.5, repetition_penalty=2.0, bad_words=((7,),)), logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("options", [{"top_k": 40}, {"top_k": 0, "top_p": 1.0}])
def test_temperature_zero_is_greedy(options):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) / 100
    for seed in range(8):
        row = request(temperature=0.0, random_seed=seed, **options)
        assert run(row, logits).output_ids == ((int(logits.argmax()),),)


def drawn(probabilities: list[float], **options: Any) -> np.ndarray:
    """Draw 2,000 times from one distribution; return how often each token came."""
    logits = torch.full((1, VOCAB), -1e4)
    logits[0, : len(probabilities)] = torch.tensor(probabilities).log()
    sampler = Sampler(VOCAB)
    rows = [sampler.begin(request(random_seed=seed, **options)) for seed in range(500)]
    for _ in range(4):
        sampler.step(rows, logits.repeat(len(rows), 1))
    tokens = [row.result().output_ids[0] for row in rows]
    return np.bincount(np.ravel(tokens), minlength=len(probabilities)) / 2000


@pytest.mark.parametrize("selection", [{"top_k": 4, "top_p": 0.7}, {"top_k": 0, "top_p": 0.7}])
@pytest.mark.parametrize(
    ("include_boundary", "expected"),
    [(False, [5 / 7, 2 / 7, 0, 0]), (True, [0.625, 0.375, 0, 0])],
)
def test_boundary_token_keeps_its_share_of_the_nucleus(selection, include_boundary, expected):
    rates = drawn([0.5, 0.3, 0.15, 0.05], whole_boundary=include_boundary, **selection)
    np.testing.assert_allclose(rates, expected, atol=0.04)  # 4 standard deviations of 2000 draws


@pytest.mark.parametrize("selection", [{"top_k": 0}, {"top_k": 4}])
def test_tokens_far_below_the_likeliest_are_not_drawn(selection):
    rates = drawn([0.5, 0.3, 0.15, 0.05], min_p=0.4, top_p=1.0, **selection)
    np.testing.assert_allclose(rates, [0.625, 0.375, 0, 0], atol=0.045)


def test_rows_of_both_rules_for_the_boundary_are_drawn_together():
    logits = torch.full((1, VOCAB), -1e4)
    logits[0, :3] = torch.tensor([0.5, 0.4, 0.1]).log()
    sampler = Sampler(VOCAB, nucleus_include_boundary=True)
    options: dict[str, Any] = {"top_k": 0, "top_p": 0.55, "output_len": 500}
    rows = [
        sampler.begin(request(whole_boundary=whole, random_seed=3, **options))
        for whole in (False, True, None)
    ]
    for _ in range(500):
        sampler.step(rows, logits.repeat(3, 1))
    shares = [np.mean(row.result().output_ids[0]) for row in rows]
    np.testing.assert_allclose(shares, [0.05 / 0.55, 0.4 / 0.9, 0.4 / 0.9], atol=0.07)


def test_nucleus_beyond_the_first_candidates_is_drawn_from_the_whole_row():
    size = 5000  # flat, so the nucleus is far longer than what is looked at first
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(3)) / 10
    order = sorted(range(size), key=lambda token: (-float(logits[0, token]), token))
    sums = torch.softmax(logits.double(), -1)[0, order].cumsum(0)
    sampler = Sampler(size)
    options = SamplingParams(end_id=END, top_k=0, top_p=0.75, random_seed=5)
    decoded = sampler.begin(SequenceRequest((1,), 50, options, (1,)))
    generator = Xorwow(5)
    for _ in range(50):
        sampler.step([decoded], logits)
        threshold = generator.uniform() * 0.75
        place = int(torch.searchsorted(sums, threshold))
        # FP32 masses and their norm against FP64 ones: the neighbour is as good this near to the
        # boundary, a twentieth of a token's mass.
        near = {order[i] for i in (place - 1, place, place + 1) if 0 <= i < size}
        assert decoded.tokens[0] in near
        assert decoded.tokens[0] == order[place] or abs(sums[place] - threshold) < 1e-5


@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), float("inf")])
@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 4}, {"top_k": 0, "top_p": 0.5}, {"return_log_probs": True}, {"beam_width": 2}],
)
def test_unusable_logits_fail_their_row_alone(bad, options):
    sampler = Sampler(VOCAB)
    decoded = [sampler.begin(request(**options)) for _ in range(2)]
    slots = options.get("beam_width", 1)
    logits = torch.cat([torch.full((slots, VOCAB), bad), favouring(7).repeat(slots, 1)])
    sampler.step(decoded, logits)
    failed, fine = decoded
    assert (failed.error, failed.is_finished) == (UNUSABLE, True)
    assert (fine.error, fine.tokens[0]) == (None, 7)


def test_a_whole_row_is_drawn_from_in_order():
    row = torch.tensor([[0.1, 0.4, 0.1, 0.3, 0.1]]).log()
    whole = select(row, width=1, with_norm=True)
    tokens = [
        _draw_from_all(whole, 0, ARG_MAX._replace(top_k=0, uniform=uniform))[0]
        for uniform in (0.1, 0.41, 0.75, 0.85, 0.95, 1.0, 2.0)
    ]
    assert tokens == [1, 3, 0, 2, 4, 4, 4]
