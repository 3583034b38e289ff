"""Sampled rows: rules in their order, reasons to stop, scores, and draws by the reference rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inference.decoding.answer import UNUSABLE
from inference.decoding.candidates import select
from inference.decoding.draws import ARG_MAX, Xorwow
from inference.decoding.rows import PromptResult, SequenceRequest, SequenceResult
from inference.decoding.sampler import Sampler
from inference.decoding.sampling import _draw_from_all
from inference.decoding.sampling_params import SamplingParams

VOCAB = 52
END = 51


def request(
    *, context: tuple[int, ...] = (3, 4), output_len: int = 4, **options: Any
) -> SequenceRequest:
    return SequenceRequest(
        context, output_len, SamplingParams(end_id=END, **options), context, returned_ids=context
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


def test_exactly_the_asked_number_of_tokens() -> None:
    result = run(request(output_len=3), *[favouring(7)] * 5)
    assert result.output_ids == ((7, 7, 7),)
    assert result.finish_reasons == ("length",)


def test_end_token_ends_a_row_and_is_kept() -> None:
    result = run(request(), favouring(7), favouring(END), favouring(8))
    assert result.output_ids == ((7, END),)
    assert result.finish_reasons == ("end",)


def test_stop_word_may_begin_in_the_prompt() -> None:
    result = run(request(stop_words=((4, 7),)), favouring(7), favouring(8))
    assert result.output_ids == ((7,),)
    assert result.finish_reasons == ("stop",)


def test_stop_word_in_the_prompt_alone_does_not_count() -> None:
    result = run(request(stop_words=((3, 4),), output_len=1), favouring(7))
    assert result.finish_reasons == ("length",)


def test_a_row_ends_at_any_of_its_end_tokens() -> None:
    for options in ({"other_end_ids": (7, 9)}, {"other_end_ids": (7, 9), "top_k": 4}):
        result = run(request(**options), favouring(8, by=60.0), favouring(9, by=60.0))
        assert (result.output_ids, result.finish_reasons) == (((8, 9),), ("end",))


@pytest.mark.parametrize("selection", [{}, {"top_k": 4}, {"frequency_penalty": 0.1}])
def test_minimum_length_bars_every_end_token(selection: dict[str, Any]) -> None:
    row = request(other_end_ids=(7,), min_length=1, **selection)
    result = run(row, favouring(END, 7, 8, by=60.0), favouring(7, by=60.0))
    assert (result.output_ids, result.finish_reasons) == (((8, 7),), ("end",))


def test_a_row_that_ignores_ends_goes_on_after_them() -> None:
    row = request(other_end_ids=(7,), ignore_eos=True, min_length=1, output_len=3)
    result = run(row, favouring(END), favouring(7), favouring(8))
    assert (result.output_ids, result.finish_reasons) == (((END, 7, 8),), ("length",))


def test_end_token_wins_over_a_stop_word() -> None:
    result = run(request(stop_words=((END,),)), favouring(END))
    assert result.finish_reasons == ("end",)


def test_running_row_has_no_reason() -> None:
    assert run(request(), favouring(7)).finish_reasons == (None,)


def test_bad_word_is_banned_after_its_prefix_only() -> None:
    row = request(bad_words=((4, 7), (8, 9)))
    result = run(row, favouring(7, 8), favouring(9, 7), favouring(9, 7))
    assert result.output_ids == ((8, 7, 9),)


def test_token_zero_cannot_be_banned() -> None:
    assert run(request(bad_words=((0,),)), favouring(0)).output_ids == ((0,),)


def test_bad_words_outside_the_vocabulary_are_harmless() -> None:
    row = request(bad_words=((VOCAB,), (VOCAB + 60,), (3, VOCAB)))
    assert run(row, favouring(7)).output_ids == ((7,),)


def test_minimum_length_bars_the_end_token_but_not_stop_words() -> None:
    row = request(min_length=2, stop_words=((8,),))
    result = run(row, favouring(END, 7), favouring(END, 8))
    assert result.output_ids == ((7, 8),)
    assert result.finish_reasons == ("stop",)


def test_minimum_length_is_harmless_where_the_end_id_is_outside_the_vocabulary() -> None:
    row = SequenceRequest((3, 4), 2, SamplingParams(end_id=VOCAB + 60, min_length=2), (3, 4))
    assert run(row, favouring(7), favouring(8)).output_ids == ((7, 8),)


def test_minimum_length_of_a_model_without_an_end_id_bars_no_token() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    best = int(logits.argmax())
    for selection in ({}, {"repetition_penalty": 1.5}, {"beam_width": 2}):
        row = SequenceRequest(
            (3, 4), 1, SamplingParams(end_id=-1, min_length=2, **selection), (3, 4)
        )
        assert run(row, logits.repeat(row.options.beam_width, 1)).output_ids[0] == (best,)


def test_padded_vocabulary_is_never_chosen() -> None:
    logits = torch.nn.functional.pad(favouring(7), (0, 12), value=99.0)
    assert run(request(), logits).output_ids == ((7,),)
    assert run(request(top_k=4), logits).output_ids[0][0] < VOCAB


def test_logits_are_left_as_they_are() -> None:
    logits = favouring(7)
    before = logits.clone()
    run(request(temperature=0.5, repetition_penalty=2.0, bad_words=((7,),)), logits)
    assert torch.equal(logits, before)


def test_repetition_penalty_moves_away_from_prompt_and_answer() -> None:
    row = request(context=(7, 3), repetition_penalty=2.0)
    assert run(row, favouring(7, 8), favouring(7, 8, 9)).output_ids == ((8, 9),)


def test_presence_penalty_counts_an_id_once() -> None:
    # 7 occurs three times; at a penalty of 3 it still leads by more than that.
    logits = favouring(7, by=4.0)
    assert run(request(context=(7, 7, 7), presence_penalty=3.0), logits).output_ids == ((7,),)
    assert run(request(context=(7, 7, 7), presence_penalty=5.0), logits).output_ids == ((0,),)


def test_penalty_skips_the_token_after_a_prompt_of_one() -> None:
    row = request(context=(7,), repetition_penalty=2.0)
    assert run(row, favouring(7, 8), favouring(7, 8)).output_ids == ((7, 8),)


def test_virtual_prompt_tokens_are_not_penalised() -> None:
    row = request(context=(VOCAB + 5, 7), repetition_penalty=2.0)
    assert run(row, favouring(7, 8)).output_ids == ((8,),)


def test_penalty_uses_logits_scaled_by_temperature() -> None:
    # Logits 9 and 8: at 0.05 they become 180 - 10 and 160, at 0.5 they become 18 - 10 and 16.
    # Penalised before scaling, 9 - 10 would lose to 8 at both.
    warm = request(context=(7, 3), presence_penalty=10.0, temperature=0.05)
    assert run(warm, favouring(7, 8)).output_ids == ((7,),)
    hot = request(context=(7, 3), presence_penalty=10.0, temperature=0.5)
    assert run(hot, favouring(7, 8)).output_ids == ((8,),)


def test_equal_logits_give_the_lowest_id() -> None:
    logits = favouring(9)
    logits[0, 5] = logits[0, 9]
    assert run(request(), logits).output_ids == ((5,),)
    assert run(request(repetition_penalty=1.5), logits).output_ids == ((5,),)


@pytest.mark.parametrize("options", [{"top_k": 40}, {"top_k": 0, "top_p": 1.0}])
def test_temperature_zero_is_greedy(options: dict[str, Any]) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) / 100
    for seed in range(8):
        row = request(temperature=0.0, random_seed=seed, **options)
        assert run(row, logits).output_ids == ((int(logits.argmax()),),)


def test_greedy_log_probs_are_zero_renormalised_and_real_in_full() -> None:
    row = request(return_log_probs=True)
    logits = favouring(7, by=2.0)
    expected = float(torch.log_softmax(logits, -1)[0, 7])
    renormalised, full = (
        run(row, logits, output_log_probs_mode=mode) for mode in ("renormalized", "full")
    )
    assert renormalised.output_log_probs == ((0.0,),)
    assert full.output_log_probs[0][0] == pytest.approx(expected, abs=1e-6)
    assert renormalised.cum_log_probs == full.cum_log_probs
    assert full.cum_log_probs[0] == pytest.approx(expected, abs=1e-6)


def test_no_log_probs_unless_asked() -> None:
    assert run(request(), favouring(7)).output_log_probs == ()


def test_the_score_of_the_prompt_starts_the_sum() -> None:
    sampler = Sampler(VOCAB)
    decoded = sampler.begin(request(return_log_probs=True))
    decoded.prompt = PromptResult(-2.5)
    assert decoded.result().cum_log_probs == (-2.5,)


def drawn(probabilities: list[float], *, count: int = 2000, **options: Any) -> np.ndarray:
    """Draw repeatedly from one distribution; return how often each token came."""
    logits = torch.full((1, VOCAB), -1e4)
    logits[0, : len(probabilities)] = torch.tensor(probabilities).log()
    config = {key: options.pop(key) for key in ["nucleus_include_boundary"] if key in options}
    row = request(output_len=count, random_seed=11, **options)
    (tokens,) = run(row, *[logits] * count, **config).output_ids
    return np.bincount(tokens, minlength=len(probabilities)) / count


@pytest.mark.parametrize("selection", [{"top_k": 4, "top_p": 0.7}, {"top_k": 0, "top_p": 0.7}])
@pytest.mark.parametrize(
    ("include_boundary", "expected"),
    [(False, [5 / 7, 2 / 7, 0, 0]), (True, [0.625, 0.375, 0, 0])],
)
def test_boundary_token_keeps_its_share_of_the_nucleus(
    selection: dict[str, Any], include_boundary: bool, expected: list[float]
) -> None:
    rates = drawn([0.5, 0.3, 0.15, 0.05], nucleus_include_boundary=include_boundary, **selection)
    np.testing.assert_allclose(rates, expected, atol=0.04)  # 4 standard deviations of 2000 draws


@pytest.mark.parametrize("selection", [{"top_k": 0}, {"top_k": 4}])
def test_tokens_far_below_the_likeliest_are_not_drawn(selection: dict[str, Any]) -> None:
    rates = drawn([0.5, 0.3, 0.15, 0.05], min_p=0.4, top_p=1.0, **selection)
    np.testing.assert_allclose(rates, [0.625, 0.375, 0, 0], atol=0.045)


def test_rows_of_both_rules_for_the_boundary_are_drawn_together() -> None:
    logits = torch.full((1, VOCAB), -1e4)
    logits[0, :3] = torch.tensor([0.5, 0.4, 0.1]).log()
    sampler = Sampler(VOCAB)
    options: dict[str, Any] = {"top_k": 0, "top_p": 0.55, "output_len": 500}
    rows = [
        sampler.begin(request(whole_boundary=whole, random_seed=3, **options))
        for whole in (False, True)
    ]
    for _ in range(500):
        sampler.step(rows, logits.repeat(2, 1))
    shares = [np.mean(row.result().output_ids[0]) for row in rows]
    np.testing.assert_allclose(shares, [0.05 / 0.55, 0.4 / 0.9], atol=0.07)


def test_top_k_renormalises_over_its_candidates() -> None:
    rates = drawn([0.4, 0.3, 0.2, 0.1], top_k=2)
    np.testing.assert_allclose(rates, [4 / 7, 3 / 7, 0, 0], atol=0.045)


def test_nucleus_of_size_zero_is_the_arg_max() -> None:
    assert drawn([0.3, 0.4, 0.3], count=50, top_k=0, top_p=0.0)[1] == 1.0


def test_nucleus_beyond_the_first_candidates_is_drawn_from_the_whole_row() -> None:
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


def test_equal_seeds_draw_equal_tokens_and_others_differ() -> None:
    logits = torch.zeros(1, VOCAB)
    rows = [
        run(request(top_k=0, top_p=1.0, random_seed=seed, output_len=8), *[logits] * 8)
        for seed in (1, 1, 2)
    ]
    assert rows[0] == rows[1]
    assert rows[0] != rows[2]


@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), float("inf")])
@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 4}, {"top_k": 0, "top_p": 0.5}, {"return_log_probs": True}, {"beam_width": 2}],
)
def test_unusable_logits_fail_their_row_alone(bad: float, options: dict[str, Any]) -> None:
    sampler = Sampler(VOCAB)
    decoded = [sampler.begin(request(**options)) for _ in range(2)]
    slots = options.get("beam_width", 1)
    logits = torch.cat([torch.full((slots, VOCAB), bad), favouring(7).repeat(slots, 1)])
    sampler.step(decoded, logits)
    failed, fine = decoded
    assert (failed.error, failed.is_finished) == (UNUSABLE, True)
    assert (fine.error, fine.tokens[0]) == (None, 7)


def test_a_whole_row_is_drawn_from_in_order() -> None:
    row = torch.tensor([[0.1, 0.4, 0.1, 0.3, 0.1]]).log()
    whole = select(row, width=1, with_norm=True)
    tokens = [
        _draw_from_all(whole, 0, ARG_MAX._replace(top_k=0, uniform=uniform))[0]
        for uniform in (0.1, 0.41, 0.75, 0.85, 0.95, 1.0, 2.0)
    ]
    assert tokens == [1, 3, 0, 2, 4, 4, 4]
