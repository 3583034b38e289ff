"""Keys and values in FP8: how far a trained model's answers move, and how many more tokens fit."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer

from export_scripts.conversion.convert import ConversionRequest, convert
from inference.engine.engine import Engine
from inference.engine.options import EngineOptions
from inference.ranks.settings import Placement
from tests.conftest import ROOT, SAMPLE_MODEL
from tests.engine_logits import prompt_logits

PASSAGES = ROOT / "examples" / "passages.jsonl"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return convert(ConversionRequest(SAMPLE_MODEL, tmp_path, 1, "fp32")).ft_dir


def placement(kind: str) -> Placement:
    return Placement(device="cpu", kv_cache_dtype=kind)


def loss(logits: torch.Tensor, ids: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])))


@pytest.mark.parametrize("block_tokens", [0, 16])
def test_a_trained_model_loses_little(folder, block_tokens):
    tokenizer = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    texts = [json.loads(line)["text"] for line in PASSAGES.read_text().splitlines()[:12]]
    prompts = [tokenizer.encode(text).ids for text in texts]
    options = EngineOptions(max_seq_len=256, max_lanes=4, kv_block_tokens=block_tokens)
    found: list[list[torch.Tensor]] = []
    for kind in ("auto", "fp8_e4m3"):
        with Engine(folder, placement(kind), options=options) as engine:
            found.append([prompt_logits(engine, ids) for ids in prompts])
    exact, rounded = (torch.cat(each) for each in found)
    error = (rounded - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.05
    same = (rounded.argmax(1) == exact.argmax(1)).float().mean()
    assert same > 0.9
    losses = [
        sum(map(loss, each, prompts)) / len(prompts) for each in found
    ]  # of a token, as passages are about as long
    assert abs(losses[1] - losses[0]) < 0.02
