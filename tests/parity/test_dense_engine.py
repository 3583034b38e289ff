"""Engines of today's dense decoders answer as transformers does, token by token.

Prompts of several lengths run together, shorter and longer than windows and original lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export_scripts.conversion.convert import ConversionRequest, convert
from inference.decoding.request import parse_request
from inference.decoding.rows import SequenceResult
from inference.engine.engine import Engine
from inference.ranks.settings import Placement
from tests.parity.test_huggingface_families import IDS, build
from tests.rank_threads import logits_of

NAMES = (
    *("qwen2-some-windows", "qwen3", "granite", "olmo2", "gemma2", "gemma3", "smollm3"),
    *("phi3-longrope", "starcoder2", "nemotron", "falcon", "falcon-7b"),
)
PROMPTS = [IDS[:1], IDS[3:7], IDS[2:14], [*IDS, *IDS[:4]]]
ANSWER = 15
END = 2


def folder(name: str, path: Path) -> tuple[Any, Path]:
    """Return a random model and its folder."""
    model = build(name)
    model.save_pretrained(path / "source")
    request = ConversionRequest(path / "source", path / "ft", tp_size=1, weight_data_type="fp32")
    return model, convert(request).ft_dir


def answers(
    ft_dir: Path, prompts: Sequence[Sequence[int]], **options: int
) -> Sequence[SequenceResult]:
    """Return what an engine answers to prompts of one request."""
    rows, width = len(prompts), max(map(len, prompts))
    tensors: dict[str, Any] = {
        "input_ids": np.array([[*each, *[0] * (width - len(each))] for each in prompts], np.uint32),
        "input_lengths": np.array([[len(each)] for each in prompts], np.uint32),
        "request_output_len": np.full((rows, 1), ANSWER, np.uint32),
        **{name: np.full((rows, 1), value, np.uint32) for name, value in options.items()},
    }
    with Engine(ft_dir, Placement(device="cpu")) as engine:
        return engine.generate(parse_request(tensors, limits=engine.limits)).rows


def log_probs(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return those of the token after each of `ids`, (S, V), without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_and_their_log_probabilities(name: str, tmp_path: Path) -> None:
    model, ft_dir = folder(name, tmp_path)
    for prompt, row in zip(PROMPTS, answers(ft_dir, PROMPTS, num_log_probs=1), strict=True):
        ids = list(prompt)
        scores: list[float] = []
        while len(scores) < ANSWER and ids[-1] != END:
            best = log_probs(model, ids)[-1].max(0)
            ids.append(int(best.indices))
            scores.append(float(best.values))
        assert list(row.output_ids[0]) == ids[len(prompt) :]
        assert [each.log_prob for each in row.scores] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_beams_have_the_scores_of_their_tokens(name: str, tmp_path: Path) -> None:
    model, ft_dir = folder(name, tmp_path)
    prompts = PROMPTS[1:3]
    for prompt, row in zip(prompts, answers(ft_dir, prompts, beam_width=3), strict=True):
        assert len(set(row.output_ids)) == 3
        for tokens, score in zip(row.output_ids, row.cum_log_probs, strict=True):
            found = log_probs(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
            expected = found.gather(1, torch.tensor(tokens)[:, None]).sum()
            assert score == pytest.approx(float(expected), abs=1e-4)


# The largest error, of the largest logit: 8 bits of weights and of rows, 8 bits of every value.
ROUNDED: dict[str, tuple[dict[str, Any], float]] = {
    "int8": ({"int8_mode": 1}, 0.15),
    "bf16": ({"data_type": "bf16"}, 0.05),
}


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("name", NAMES)
def test_rounded_weights_give_nearly_the_same_logits(name: str, kind: str, tmp_path: Path) -> None:
    model, ft_dir = folder(name, tmp_path)
    settings, tolerance = ROUNDED[kind]
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].float()
    found = logits_of(ft_dir, IDS, tp_size=1, pp_size=1, chunks=(5, 1, 12), **settings)
    error = float((found - expected).abs().max() / expected.abs().max())
    assert 0 < error < tolerance
