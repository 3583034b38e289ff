"""gpt-oss: all experts of a layer in one tensor, plain and in MXFP4, read and written."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from export_scripts.conversion.convert import convert, folder_problems
from export_scripts.ft.validation import read_manifest
from tests.conversions import problems_of, request_of
from tests.json_files import read_json, write_json
from tests.looks import assert_exact, mentions
from tests.tiny_huggingface import read_tensors
from tests.tiny_transformers import write_model
from tests.unit.export_scripts.conversion.test_mixtures import logits, problems, written

EXPERTS = ("gate_up_proj", "down_proj")
FIRST = "model.layers.0.mlp.experts."


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return write_model("gpt-oss", tmp_path_factory.mktemp("gpt_oss") / "plain")


def changed(
    source: Path,
    folder: Path,
    change: Callable[[dict[str, torch.Tensor]], object] = lambda _: None,
    **settings: Any,
) -> Path:
    """Copy a folder with its tensors, and some of its settings, changed."""
    shutil.copytree(source, folder)
    tensors = read_tensors(source)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = folder / "config.json"
    write_json(config, {**read_json(config), **settings})
    return folder


def packed(tensors: dict[str, torch.Tensor]) -> None:
    """Put random blocks in MXFP4 in place of the experts' matrices, as OpenAI publishes them."""
    chance = torch.Generator().manual_seed(3)

    def bytes_of(low: int, high: int, *sizes: int) -> torch.Tensor:
        return torch.randint(low, high, sizes, generator=chance, dtype=torch.uint8)

    for name in [each for each in tensors if each.endswith(EXPERTS)]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = bytes_of(0, 256, experts, outputs, inputs // 32, 16)
        tensors[f"{name}_scales"] = bytes_of(116, 128, experts, outputs, inputs // 32)


MXFP4: Mapping[str, Any] = {
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
}


def test_the_folder_has_the_bytes_of_its_source(plain, tmp_path):
    folder = written(plain, tmp_path)
    mine, theirs = read_tensors(folder), read_tensors(plain)
    assert_exact(mine, theirs)
    assert folder_problems(folder) == []
    assert_exact(logits(folder), logits(plain))
    made = read_manifest(folder)["tensors"][f"{FIRST}gate_up_proj"]
    assert made["source"] == [f"{FIRST}gate_up_proj"]


def test_blocks_become_the_values_that_transformers_makes_of_them(plain, tmp_path):
    source = changed(plain, tmp_path / "source", packed, **MXFP4)
    stored = read_tensors(source)
    found = read_tensors(written(source, tmp_path / "out"))
    names = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    assert len(names) == 2 * 4
    for name in names:
        parts = stored[f"{name}_blocks"], stored[f"{name}_scales"]
        wanted = convert_moe_packed_tensors(*parts, dtype=torch.bfloat16)
        assert_exact(found[name].to(torch.bfloat16), wanted)


def _without_scales(tensors: dict[str, torch.Tensor]) -> None:
    packed(tensors)
    del tensors[f"{FIRST}down_proj_scales"]


def _with_fewer_scales(tensors: dict[str, torch.Tensor]) -> None:
    packed(tensors)
    name = f"{FIRST}down_proj_scales"
    tensors[name] = tensors[name][1:].clone()


def _with_nan(tensors: dict[str, torch.Tensor]) -> None:
    packed(tensors)
    tensors[f"{FIRST}down_proj_scales"][2, 1, 0] = 255


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (_without_scales, MXFP4, f"{FIRST}down_proj_scales is missing"),
        (_with_fewer_scales, MXFP4, f"{FIRST}down_proj has parts of 5 and 6 experts"),
        (packed, {"quantization_config": {"quant_method": "mxfp4", "rotation": 1}}, "rotation = 1"),
        (lambda _: None, {"num_local_experts": 7}, f"{FIRST}gate_up_proj#6 is missing"),
        (
            lambda _: None,
            {"num_local_experts": 5},
            f"{FIRST}gate_up_proj has 6 entries, and the model",
        ),
        (lambda _: None, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    change,
    settings,
    words,
    plain,
    tmp_path,
):
    source = changed(plain, tmp_path / "source", change, **settings)
    assert words in problems(source, tmp_path / "out")


def test_a_scale_that_is_not_a_number_is_found(plain, tmp_path):
    source = changed(plain, tmp_path / "source", _with_nan, **MXFP4)
    with pytest.raises(ValueError, match=f"{FIRST}down_proj: the checkpoint holds 32 values"):
        written(source, tmp_path / "out")


def test_experts_have_no_form_in_fp8(plain, tmp_path):
    words = "GptOssForCausalLM has no form in FP8"
    assert words in problems_of(plain, tmp_path, output_format="huggingface", fp8="channel")


def test_another_gate_than_others_compute_is_remarked(plain, tmp_path):
    source = changed(plain, tmp_path / "source", swiglu_limit=5.0)
    done = convert(request_of(source, tmp_path / "out", output_format="huggingface"))
    assert mentions(done.remarks, "swiglu_limit are (1.702, 5.0)")
    assert_exact(logits(done.ft_dir), logits(source))
