"""Hugging Face BERT: names of different ages, and what is refused."""

from pathlib import Path

import pytest
import torch

from tests.conversions import converted
from tests.tiny_huggingface import copy_of, read_tensors


@pytest.fixture
def tiny(shared: Path) -> Path:
    return shared / "golden/bert/tiny/source"


def renamed(source: Path, target: Path, **words: str) -> Path:
    tensors: dict[str, torch.Tensor | None] = {}
    for key, value in read_tensors(source).items():
        name = key
        for old, new in words.items():
            name = name.replace(f"LayerNorm.{old}", f"LayerNorm.{new}")
        tensors |= {key: None, name: value}
    return copy_of(source, target, tensors=tensors)


def test_norms_of_the_first_ports_are_found(tiny, tmp_path):
    old = converted(
        renamed(tiny, tmp_path / "old", weight="gamma", bias="beta"), tmp_path / "old-out"
    )
    new = converted(tiny, tmp_path / "new-out")
    for name in new.names():
        assert torch.equal(old.read(name), new.read(name))


def test_a_model_with_a_head_is_converted_without_it(tiny, tmp_path):
    tensors: dict[str, torch.Tensor | None] = {}
    for key, value in read_tensors(tiny).items():
        tensors |= {key: None, f"bert.{key}": value}
    tensors["classifier.weight"] = torch.zeros(2, 32)
    tensors["cls.predictions.bias"] = torch.zeros(131)
    reader = converted(copy_of(tiny, tmp_path / "hf", tensors=tensors), tmp_path / "out")
    assert len(reader.names()) == 2 * 16


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"is_decoder": True}, "is_decoder = True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "tanh"}, "hidden_act = tanh"),
        ({"add_cross_attention": True}, "add_cross_attention"),
    ],
    ids=["decoder", "positions", "activation", "cross attention"],
)
def test_models_that_ft_cannot_express_are_refused(tiny, tmp_path, settings, words):
    source = copy_of(tiny, tmp_path / "hf", config=settings)
    with pytest.raises(ValueError, match=words):
        converted(source, tmp_path / "out")


def test_the_form_of_gelu_is_recorded(tiny, tmp_path):
    exact = converted(tiny, tmp_path / "exact")
    assert exact.config.architecture().exact_gelu
    source = copy_of(tiny, tmp_path / "hf", config={"hidden_act": "gelu_new"})
    tanh = converted(source, tmp_path / "tanh")
    assert not tanh.config.architecture().exact_gelu
