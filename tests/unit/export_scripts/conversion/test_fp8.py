"""Hugging Face folders in FP8: read back, dequantised by transformers, certified, and refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from export_scripts.conversion.convert import (
    ConversionRequest,
    check_conversion,
    convert,
    folder_problems,
)
from export_scripts.conversion.huggingface import WEIGHTS_NAME
from export_scripts.numeric.narrowing import fp8_bytes, to_fp8
from foundations.errors import CheckpointMismatchError
from inference.certify.certify import certify
from inference.certify.options import CertifySection
from tests.conversions import folder_of
from tests.json_files import read_json
from tests.looks import assert_exact, mentions
from tests.tiny_transformers import write_model
from tests.unit.export_scripts.conversion.test_mixtures import logits

BLOCKS = {"block": (128, 128), "channel": None, "tensor": None}
SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384}


def request(source: Path, out: Path, form: str | None, **fields: Any) -> ConversionRequest:
    values = {"output_format": "huggingface", "fp8": form, **fields}
    return ConversionRequest(source, out, 1, "fp32", **values)


def test_every_value_is_rounded_as_torch_rounds_it():
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = np.random.default_rng(0).normal(scale=60, size=100_000).astype(np.float32)
    values = np.concatenate([every[np.isfinite(every)], between])
    expected = torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert (fp8_bytes(values) == expected.view(torch.uint8).numpy()).all()
    assert fp8_bytes(np.array([np.nan], np.float32))[0] == 0x7F


def test_zeros_and_the_smallest_numbers_have_a_scale():
    values = np.zeros((4, 32), np.float32)
    values[1], values[2], values[3] = 1e-45, 3e38, -7
    codes, scales = to_fp8(values, (1, 32))
    wide = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * torch.from_numpy(scales)
    assert scales[0] == 1
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    torch.testing.assert_close(wide, torch.from_numpy(values), rtol=1e-6, atol=1e-40)


@pytest.mark.parametrize("form", BLOCKS)
def test_a_folder_reads_back_as_its_rounded_values(form, tmp_path):
    base = write_model("llama", tmp_path / "base", **SIZES)
    asked = request(base, tmp_path / "out", form)
    assert check_conversion(asked) == []
    folder = convert(asked).ft_dir
    assert folder_problems(folder) == []
    assert convert(asked).already_done
    own, stored = load_file(base / WEIGHTS_NAME), load_file(folder / WEIGHTS_NAME)
    back = convert(request(folder, tmp_path / "back", None)).ft_dir
    wide = load_file(back / WEIGHTS_NAME)
    narrow = [name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(narrow) == 2 * 7
    for name, tensor in own.items():
        if name not in narrow:
            assert torch.equal(stored[name], tensor), name
            continue
        height, width = BLOCKS.get(form) or (
            1 if form == "channel" else len(tensor),
            tensor.shape[1],
        )
        blocks = tensor.unfold(0, height, height).unfold(1, width, width)
        scale = blocks.abs().amax((2, 3)) / 448
        each = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
        expected = (tensor / each).to(torch.float8_e4m3fn).float() * each
        torch.testing.assert_close(wide[name], expected, rtol=1e-6, atol=0)
    settings = read_json(folder / "config.json")["quantization_config"]
    left = settings.get("modules_to_not_convert") or settings["ignore"]
    assert left == ["model.embed_tokens", "lm_head"]
    options = CertifySection(
        name="c",
        time_limit=1,
        source=str(base),
        folder=str(folder),
        output_dir=str(tmp_path),
        layers=False,
    )
    parts = {part.name: part for part in certify(options).parts}
    assert parts["tensors"].status == "equal up to", parts["tensors"]


def test_transformers_widens_blocks_to_the_same(tmp_path):
    base = write_model("llama", tmp_path / "base", **SIZES)
    folder = convert(request(base, tmp_path / "out", "block")).ft_dir
    back = convert(request(folder, tmp_path / "back", None)).ft_dir
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )
    with torch.no_grad():
        found = model.eval()(torch.arange(3, 23)[None]).logits
    assert_exact(found, logits(back))


def test_the_source_may_be_of_any_form(tmp_path):
    base = write_model("llama", tmp_path / "base", **SIZES)
    shards = folder_of(base, tmp_path / "shards", tp_size=2)
    found, expected = (
        load_file(convert(request(each, tmp_path / each.name, "block")).ft_dir / WEIGHTS_NAME)
        for each in (shards, base)
    )
    assert_exact(found, expected)


def test_files_of_any_size_hold_values_with_their_scales(tmp_path):
    base = write_model("qwen3-moe", tmp_path / "base", hidden_size=128, moe_intermediate_size=128)
    folders = [
        convert(request(base, tmp_path / str(size), "block", max_shard_bytes=size)).ft_dir
        for size in (1 << 30, 1 << 15)
    ]
    whole, several = (
        {key: t for file in folder.glob("*.safetensors") for key, t in load_file(file).items()}
        for folder in folders
    )
    assert len([*folders[1].glob("*.safetensors")]) > 2
    assert_exact(whole, several)
    assert whole["model.layers.0.mlp.gate.weight"].dtype == torch.float32
    expert = whole["model.layers.0.mlp.experts.0.up_proj.weight"]
    assert expert.dtype == torch.float8_e4m3fn


def test_a_router_stays_wide_whatever_its_size(tmp_path):
    base = write_model("qwen3-moe", tmp_path / "base", num_experts=16, hidden_size=128)
    folder = convert(request(base, tmp_path / "out", "channel")).ft_dir
    tensors = load_file(folder / WEIGHTS_NAME)
    assert tensors["model.layers.0.mlp.gate.weight"].dtype == torch.float32
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn


def test_matrices_of_odd_sizes_stay_wide_with_those_they_are_joined_with(tmp_path):
    sizes = SIZES | {"num_key_value_heads": 1}  # 64 rows of keys, 64 of values
    base = write_model("llama", tmp_path / "base", **sizes)
    done = convert(request(base, tmp_path / "out", "block"))
    tensors = load_file(done.ft_dir / WEIGHTS_NAME)
    narrow = {name for name, each in tensors.items() if each.dtype == torch.float8_e4m3fn}
    assert {name.split(".")[3] for name in narrow} == {"mlp"}
    settings = read_json(done.ft_dir / "config.json")["quantization_config"]
    assert "model.layers.1.self_attn.q_proj" in settings["modules_to_not_convert"]
    assert mentions(done.remarks, "self_attn.q_proj")


def test_the_rest_is_refused(tmp_path):
    base = write_model("llama", tmp_path / "base", **SIZES)
    fields = {"output_format": "fastertransformer"}
    (problem,) = check_conversion(request(base, tmp_path / "out", "block", **fields))
    assert "--fp8=block" in problem
    small = write_model("llama", tmp_path / "small")
    (problem,) = check_conversion(request(small, tmp_path / "out", "block"))
    assert "128" in problem
    (problem,) = check_conversion(request(write_model("gpt2", tmp_path / "g"), tmp_path, "block"))
    assert "GPT2LMHeadModel" in problem
    file = base / WEIGHTS_NAME
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointMismatchError, match=f"{name} holds 1 values"):
        convert(request(base, tmp_path / "out", "channel"))
    assert not (tmp_path / "out" / "huggingface").exists()
