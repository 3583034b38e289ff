"""A row decodes the same tokens bit for bit alone and with other rows, whenever it joins."""

from __future__ import annotations

import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.decoding.rows import SequenceRequest, SequenceResult
from inference.decoding.sampler import Answer, Sampler
from inference.decoding.sampling_params import SamplingParams

VOCAB = 1003  # no multiple of any vector width
END = 7

words = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=2).map(tuple), max_size=3).map(
    tuple
)
options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.0, 0.5, 1.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.4]),
        "min_length": st.integers(0, 3),
        "bad_words": words,
        "stop_words": words,
        "random_seed": st.integers(0, 2**64 - 1),
        "return_log_probs": st.booleans(),
    }
)
selections: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {"top_k": st.integers(1, 200), "top_p": st.sampled_from([1.0, 0.6])},
    ),
    st.fixed_dictionaries(
        {
            "top_k": st.just(0),
            "top_p": st.sampled_from([0.2, 0.9, 1.0]),
            "top_p_decay": st.sampled_from([1.0, 0.7]),
        }
    ),
    st.fixed_dictionaries(
        {
            "beam_width": st.integers(2, 5),
            "len_penalty": st.sampled_from([0.0, 1.0, -0.7]),
            "beam_search_diversity_rate": st.sampled_from([0.0, -0.3]),
        }
    ),
)
rows = st.builds(
    lambda common, selection, context, output_len: SequenceRequest(
        input_ids=context,
        output_len=output_len,
        options=SamplingParams(end_id=END, **{**common, **selection}),
        context_ids=context,
    ),
    options,
    selections,
    st.lists(st.integers(0, 40), min_size=1, max_size=4).map(tuple),
    st.integers(1, 8),
)


class MarkovModel:
    """Logits that depend on a row's number, the slot's newest token and the step alone."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # 41 tokens are likely, so that words, penalties and the end token come into play.
        self.table = torch.randn(64, VOCAB, generator=generator)
        self.table[:, :41] += 3
        self.bias = torch.randn(32, VOCAB, generator=generator)

    def __call__(self, number: int, token: int, step: int) -> torch.Tensor:
        return self.table[token % 64] + self.bias[(7 * number + step) % 32]


def decode(
    requests: dict[int, SequenceRequest], model: MarkovModel, *, pool: bool, shuffle: random.Random
) -> dict[int, SequenceResult]:
    """Decode the rows together; each joins at a random step, at a random place of the batch."""
    sampler = Sampler(VOCAB, hypothesis_pool=pool)
    waiting = list(requests)
    newest: dict[Answer, list[int]] = {}
    numbers: dict[Answer, int] = {}
    steps: dict[Answer, int] = {}
    results = {}
    while waiting or newest:
        for number in list(waiting):
            if not newest or shuffle.random() < 0.5:
                waiting.remove(number)
                row = sampler.begin(requests[number])
                newest[row] = [requests[number].context_ids[-1]] * row.slots
                numbers[row], steps[row] = number, 0
        rows = shuffle.sample(list(newest), len(newest))
        logits = torch.stack(
            [model(numbers[row], token, steps[row]) for row in rows for token in newest[row]]
        )
        padding = shuffle.choice([0, 5])
        sampler.step(rows, torch.nn.functional.pad(logits, (0, padding), value=50.0))
        for row in rows:
            newest[row] = list(row.tokens)
            steps[row] += 1
            if row.is_finished:
                results[numbers[row]] = row.result()
                del newest[row]
    return results


@settings(max_examples=50)
@given(
    requests=st.lists(rows, min_size=2, max_size=6),
    pool=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_row_decodes_the_same_alone_and_in_company(
    requests: list[SequenceRequest], pool: bool, seed: int
) -> None:
    model, shuffle = MarkovModel(seed), random.Random(seed)
    together = decode(dict(enumerate(requests)), model, pool=pool, shuffle=shuffle)
    for number, request in enumerate(requests):
        alone: Any = decode({number: request}, model, pool=pool, shuffle=shuffle)
        assert alone[number] == together[number]


@settings(max_examples=20)
@given(request=rows, pool=st.booleans(), seed=st.integers(0, 2**16))
def test_asking_for_results_on_the_way_changes_nothing(
    request: SequenceRequest, pool: bool, seed: int
) -> None:
    model = MarkovModel(seed)
    final = []
    for watched in (False, True):
        sampler = Sampler(VOCAB, hypothesis_pool=pool)
        row = sampler.begin(request)
        newest = [request.context_ids[-1]] * row.slots
        for n in range(request.output_len):
            sampler.step([row], torch.stack([model(0, t, n) for t in newest]))
            newest = list(row.tokens)
            if watched:
                row.result()
            if row.is_finished:
                break
        final.append(row.result())
    assert final[0] == final[1]
