"""The text models of models of images and texts: what they compute for texts, and no more."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from export_scripts.conversion.convert import convert
from tests.conversions import problems_of, request_of, written
from tests.json_files import read_json, write_json
from tests.looks import assert_exact
from tests.tiny_huggingface import read_tensors

_TEXT: Mapping[str, Any] = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
_TOWER: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_DEEP: Mapping[str, Any] = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14,
    "intermediate_size": 32,
}  # fmt: skip


def _mrope(*sections: int, **more: Any) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 700.0, "mrope_section": sections}
    return {**_TEXT, "rope_parameters": {**parameters, **more}}


# The type of a whole -> its class without ForConditionalGeneration, its text model's settings, and
# those of what reads images; and the type that the text model becomes.
MODELS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any], str]] = {
    "mistral3": (
        "Mistral3",
        {**_TEXT, "model_type": "ministral3", "head_dim": 8},
        {**_TOWER, "model_type": "pixtral", "head_dim": 16},
        "ministral3",
    ),
    "gemma3": (
        "Gemma3",
        {**_TEXT, "head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2},
        {**_TOWER, "model_type": "siglip_vision_model"},
        "gemma3_text",
    ),
    "qwen2_5_vl": ("Qwen2_5_VL", _mrope(2, 1, 1), _DEEP, "qwen2"),
    "qwen3_vl": (
        "Qwen3VL",
        {**_mrope(2, 1, 1, mrope_interleaved=True), "head_dim": 8},
        {**_DEEP, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        "qwen3",
    ),
    "glm4v": (
        "Glm4v", _mrope(1, 1, 0, partial_rotary_factor=0.5), {**_DEEP, "image_size": 28}, "glm4",
    ),
}  # fmt: skip


def write_whole(name: str, folder: Path) -> Path:
    """Save a random model of images and texts whose every parameter matters."""
    kind, text, images, _ = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=images)
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return write_whole("qwen2_5_vl", tmp_path_factory.mktemp("whole") / "qwen2_5_vl")


def _changed(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(source, folder)
    config = read_json(folder / "config.json")
    change(config)
    write_json(folder / "config.json", config)
    return folder


def _logits(folder: Path, kind: Any) -> torch.Tensor:
    model, info = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 33)[None]).logits


@pytest.mark.parametrize("name", list(MODELS))
def test_texts_have_the_logits_of_the_whole(name, tmp_path):
    source = write_whole(name, tmp_path / "source")
    done = convert(request_of(source, tmp_path / "out", output_format="huggingface"))
    kind = read_json(done.ft_dir / "config.json")["model_type"]
    assert kind == MODELS[name][-1]
    assert any(name in each and "tensors of images" in each for each in done.remarks)
    assert_exact(
        _logits(done.ft_dir, transformers.AutoModelForCausalLM),
        _logits(source, transformers.AutoModelForImageTextToText),
    )


def test_settings_may_lie_next_to_those_of_images(qwen, tmp_path):
    def flatten(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        rotary = text.pop("rope_parameters")
        config |= {
            **text,
            "model_type": "qwen2_5_vl",
            "rope_theta": rotary["rope_theta"],
            "rope_scaling": {"type": "mrope", "mrope_section": rotary["mrope_section"]},
        }

    source = _changed(qwen, tmp_path / "source", flatten)
    folder = written(source, tmp_path / "out")
    expected = written(qwen, tmp_path / "expected")
    mine, theirs = read_tensors(folder), read_tensors(expected)
    assert mine.keys() == theirs.keys()
    assert_exact(
        _logits(folder, transformers.AutoModelForCausalLM),
        _logits(expected, transformers.AutoModelForCausalLM),
    )


def _without_base(config: dict[str, Any]) -> None:
    del config["text_config"]["rope_parameters"]["rope_theta"]
    del config["text_config"]["rms_norm_eps"]


LINEAR = {"rope_type": "linear", "factor": 2.0}


def _text(**settings: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["text_config"].update(settings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_base, "no rms_norm_eps, rope_theta, whose defaults differ in a qwen2_5_vl_text"),
        (lambda config: config.update(text_config=[1]), "text_config = [1]: expected a table"),
        (lambda config: config.update(fuse_norms=True), "fuse_norms = True is not known"),
        (_text(model_type="mamba"), "model type mamba"),
        (lambda config: config.update(rope_scaling=LINEAR), "and None in text_config: releases"),
        (_text(rope_scaling=LINEAR), "no rope_theta, whose"),
        (_text(use_sliding_window=True, max_window_layers=None), "no max_window_layers, whose"),
        (_text(model_type="glm4v_text"), "no partial_rotary_factor, whose"),
        (
            _text(model_type="qwen3_vl_text", use_sliding_window=True),
            "use_sliding_window = True, and a qwen3_vl_text always computes with False",
        ),
        (
            _text(model_type="granite", logits_scaling=3.0),
            "logits_scaling = 3.0 of a granite, which a qwen2_5_vl does not apply: state 1",
        ),
        (lambda config: config.update(model_type="idefics3"), "model type idefics3"),
    ],
)
def test_what_is_not_known_is_refused_by_name(change, words, qwen, tmp_path):
    source = _changed(qwen, tmp_path / "source", change)
    assert words in problems_of(source, tmp_path / "out", output_format="huggingface")


def test_an_unknown_tensor_is_not_taken_for_one_of_images(qwen, tmp_path):
    source = Path(shutil.copytree(qwen, tmp_path / "source"))
    tensors = read_tensors(source) | {"model.adapters.weight": torch.ones(2)}
    save_file(tensors, source / "model.safetensors")
    found = problems_of(source, tmp_path / "out", output_format="huggingface")
    assert "model.adapters.weight [[2]] is not a tensor of" in found
