"""Quantised Hugging Face folders as sources, against torch's arithmetic and transformers' own."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from export_scripts.conversion.convert import check_conversion
from export_scripts.ft.reader import FTReader
from foundations.errors import CheckpointMismatchError
from inference.engine.engine import Engine
from inference.ranks.settings import Placement
from tests.conversions import folder_of, problems_of, request_of, written
from tests.engine_logits import prompt_logits
from tests.json_files import read_json, write_json
from tests.looks import assert_exact
from tests.tiny_huggingface import copy_of, read_tensors
from tests.tiny_transformers import write_model

Tensors = dict[str, torch.Tensor]
# (the tensors stored for a matrix, by the ends of their names; the matrix that they stand for)
Quantised = tuple[Tensors, torch.Tensor]
FP8 = torch.float8_e4m3fn
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 56}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.fixture
def original(tmp_path) -> Path:
    return write_model("llama", tmp_path / "original", **SIZES)


def fp8_by_tensor(weight: torch.Tensor, name: str = "scale") -> Quantised:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(FP8)
    stored = {"weight": values, f"weight_{name}": scale, "input_scale": torch.tensor(0.25)}
    return stored, values.float() * scale


def fp8_by_row(weight: torch.Tensor) -> Quantised:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    values = (weight / scale.float()).to(FP8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def fp8_by_block(weight: torch.Tensor, end: str = "weight_scale_inv") -> Quantised:
    """Blocks of 32 x 16."""
    rows, columns = weight.shape[0] // 32, weight.shape[1] // 16
    blocks = weight.view(rows, 32, columns, 16)
    scale = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).view(weight.shape).to(FP8)
    wide = values.float() * torch.kron(scale, torch.ones(32, 16))
    return {"weight": values, end: scale}, wide


def fp8_of_transformers(weight: torch.Tensor) -> Quantised:
    stored, wide = fp8_by_tensor(weight, "scale_inv")
    stored["activation_scale"] = stored.pop("input_scale")
    return stored, wide


def int8_by_row(weight: torch.Tensor) -> Quantised:
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round().to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def integers(weight: torch.Tensor, group: int, bits: int) -> Quantised:
    """Return values, zero points and scales of groups of inputs, and what they stand for."""
    grouped = weight.view(len(weight), -1, group)
    low, high = grouped.amin(2), grouped.amax(2)
    most = 2**bits - 1
    scale = ((high - low) / most).half()
    # From 1 on: GPTQ stores one less.
    zero = (-low / scale.float()).round().clamp(1, most)
    each = grouped / scale.float()[..., None] + zero[..., None]
    values = each.round().clamp(0, most).view(weight.shape)
    wide = (values.view(grouped.shape) - zero[..., None]) * scale.float()[..., None]
    found = {"values": values.long(), "zeros": zero.long(), "scales": scale}
    return found, wide.view(weight.shape)


def packed(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return each row's values in words of 32 bits, the first lowest."""
    count = 32 // bits
    digits = values.unflatten(-1, (-1, count))[..., list(order or range(count))]
    return (digits << torch.arange(0, 32, bits)).sum(-1).int()


def awq(weight: torch.Tensor) -> Quantised:
    found, wide = integers(weight, 16, 4)
    stored = {
        "qweight": packed(found["values"].T.contiguous(), 4, AWQ_ORDER),
        "qzeros": packed(found["zeros"].T.contiguous(), 4, AWQ_ORDER),
        "scales": found["scales"].T,
    }
    return stored, wide


def gptq(
    weight: torch.Tensor, bits: int = 4, less: int = 1, *, reordered: bool = False
) -> Quantised:
    size = 16
    order = torch.randperm(weight.shape[1]) if reordered else torch.arange(weight.shape[1])
    found, wide = integers(weight[:, order], size, bits)
    groups = torch.arange(weight.shape[1]) // size
    back = order.argsort()
    stored = {
        "qweight": packed(found["values"][:, back].contiguous(), bits).T,
        "qzeros": packed((found["zeros"] - less).T.contiguous(), bits),
        "scales": found["scales"].T,
        "g_idx": groups[back].int(),
    }
    return stored, wide[:, back]


def packed_rows(weight: torch.Tensor) -> Quantised:
    scale = (weight.view(len(weight), -1, 16).abs().amax(2) / 7).half()
    values = (weight.view(len(weight), -1, 16) / scale.float()[..., None]).round()
    wide = (values * scale.float()[..., None]).view(weight.shape)
    stored = {
        "weight_packed": packed((values.long() + 8).view(weight.shape), 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, wide


def packed_with_zeros(weight: torch.Tensor) -> Quantised:
    found, wide = integers(weight, 16, 4)
    stored = {
        "weight_packed": packed(found["values"], 4),
        "weight_scale": found["scales"],
        "weight_zero_point": packed(found["zeros"].T.contiguous(), 4).T,
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, wide


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


FORMS: Mapping[str, tuple[dict[str, Any], Callable[[torch.Tensor], Quantised]]] = {
    "block": (
        transformers.FineGrainedFP8Config(weight_block_size=[32, 16]).to_dict(),
        fp8_by_block,
    ),
    "tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_by_tensor),
    "tensor of transformers": (
        transformers.FineGrainedFP8Config("static", weight_block_size=None).to_dict(),
        fp8_of_transformers,
    ),
    "compressed by row": (
        compressed("float-quantized", type="float", num_bits=8, strategy="channel"),
        fp8_by_row,
    ),
    "compressed by tensor": (
        compressed("float-quantized", type="float", num_bits=8, strategy="tensor"),
        fp8_by_tensor,
    ),
    "compressed by block": (
        compressed("float-quantized", type="float", num_bits=8, block_structure=[32, 16]),
        lambda weight: fp8_by_block(weight, "weight_scale"),
    ),
    "compressed integers": (
        compressed("int-quantized", type="int", num_bits=8, strategy="channel"),
        int8_by_row,
    ),
    "packed integers": (
        compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=16),
        packed_rows,
    ),
    "packed integers with zero points": (
        compressed("pack-quantized", type="int", num_bits=4, symmetric=False, strategy="group"),
        packed_with_zeros,
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_by_tensor),
    "awq": (
        transformers.AwqConfig(group_size=16).to_dict(),
        awq,
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16}, gptq),
    "gptq of 8 bits": (
        transformers.GPTQConfig(bits=8, group_size=16).to_dict(),
        lambda weight: gptq(weight, 8),
    ),
    # As GPTQModel writes bits of a layer's own, and symmetric AWQ, which it gives zero points of 8.
    "gptq of several bits": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down_proj": {"bits": 8}}},
        lambda weight: gptq(weight, 8 if weight.shape[1] == SIZES["intermediate_size"] else 4),
    ),
    "awq without zero points": (
        {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": False},
        awq,
    ),
    "gptq reordered": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        lambda weight: gptq(weight, reordered=True),
    ),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "format": "gptq_v2"},
        lambda weight: gptq(weight, less=0),
    ),
}


def quantised(original: Path, folder: Path, form: str) -> tuple[Path, Tensors]:
    """Write a folder with every projection quantised; return it, and what it stands for."""
    settings, quantise = FORMS[form]
    changed: dict[str, torch.Tensor | None] = {}
    wide = read_tensors(original)
    for key, weight in list(wide.items()):
        if key.endswith("_proj.weight"):
            stored, wide[key] = quantise(weight)
            changed[key] = None
            changed |= {key.removesuffix("weight") + end: each for end, each in stored.items()}
    return copy_of(
        original, folder, config={"quantization_config": settings}, tensors=changed
    ), wide


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_weights_are_widened_by_the_library_s_formula(form, kind, original, tmp_path):
    source, expected = quantised(original, tmp_path / "source", form)
    folder = written(source, tmp_path, weight_data_type=kind)
    assert "quantization_config" not in read_json(folder / "config.json")
    found = read_tensors(folder)
    if kind == "bf16":
        expected = {key: value.bfloat16() for key, value in expected.items()}
    assert_exact(found, expected)


def test_transformers_computes_the_same_of_block_scaled_weights(original, tmp_path):
    source, _ = quantised(original, tmp_path / "source", "block")
    folder = written(source, tmp_path)
    outputs = []
    for path in (source, folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            outputs.append(model.eval()(torch.arange(3, 20)[None]).logits)
    assert_exact(*outputs)


def test_modelopt_may_state_its_form_in_a_file_of_its_own(original, tmp_path):
    source, expected = quantised(original, tmp_path / "source", "modelopt")
    config = read_json(source / "config.json")
    del config["quantization_config"]
    write_json(source / "config.json", config)
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    write_json(source / "hf_quant_config.json", stated)
    found = read_tensors(written(source, tmp_path))
    assert_exact(found, expected)


def test_shards_are_made_of_quantised_folders(original, tmp_path):
    source, expected = quantised(original, tmp_path / "source", "awq")
    shards = folder_of(source, tmp_path, tp_size=2)
    found = read_tensors(written(shards, tmp_path))
    assert_exact(found, expected)


KEPT = ("block", "tensor", "compressed by row", "compressed by block", "modelopt")


@pytest.mark.parametrize("form", KEPT)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_fp8_is_kept_as_it_is(form, tp_size, original, tmp_path):
    source, expected = quantised(original, tmp_path / "source", form)
    shards = folder_of(source, tmp_path / "kept", tp_size=tp_size, keep_fp8=True)
    reader, stored = FTReader(shards), read_tensors(source)
    name = "model.layers.1.mlp.dense_4h_to_h.weight"  # whose ranks share the inputs
    parts = [reader.in_fp8(name, rank) for rank in range(tp_size)]
    values = torch.cat([part[0] for part in parts if part is not None])
    key = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(values.view(torch.uint8), stored[key].T.contiguous().view(torch.uint8))
    assert (shards / f"{name}.0.bin").stat().st_size == values.numel() // tp_size
    wide = torch.cat([reader.read(name, rank) for rank in range(tp_size)])
    assert torch.equal(wide, expected[key].T)
    found = read_tensors(written(shards, tmp_path))
    assert_exact(found, expected)


def test_an_engine_computes_the_same_of_kept_fp8_and_of_widened(original, tmp_path):
    source, _ = quantised(original, tmp_path / "source", "block")
    logits = []
    for keep in (False, True):
        with Engine(
            folder_of(source, tmp_path / str(keep), keep_fp8=keep), Placement(device="cpu")
        ) as engine:
            logits.append(prompt_logits(engine, range(3, 20)))
    assert torch.equal(*logits)


def test_fp8_that_cannot_be_kept_is_named(original, tmp_path):
    def problems(source: Path, tp_size: int = 1, **more: Any) -> str:
        given = {"tp_size": tp_size, "weight_data_type": "bf16", "keep_fp8": True, **more}
        return problems_of(source, tmp_path / "out", **given)

    integers_alone, _ = quantised(original, tmp_path / "integers", "compressed integers")
    assert "--keep-fp8" in problems(integers_alone)
    assert "--keep-fp8" in problems(original)
    source, expected = quantised(original, tmp_path / "source", "block")
    assert "--keep-fp8" in problems(source, output_format="huggingface")
    assert problems(source, 4).count("fp8_group_size = 16") == 1  # of 96 inner inputs
    key = "model.layers.1.mlp.up_proj.weight"
    wide = {key: expected[key].bfloat16(), f"{key}_scale_inv": None}
    mixed = copy_of(source, tmp_path / "mixed", tensors=wide)
    assert f"{key} is not in FP8" in problems(mixed)
    nan = read_tensors(source)[key].view(torch.uint8).clone()
    nan[3, 4] = 0xFF
    damaged = copy_of(source, tmp_path / "nan", tensors={key: nan.view(FP8)})
    with pytest.raises(CheckpointMismatchError, match="holds 1 values that are infinite or not"):
        folder_of(damaged, tmp_path / "out", weight_data_type="bf16", keep_fp8=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method = bitsandbytes: known are fp8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = e5m2"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo = NVFP4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits"),
        (compressed("nvfp4-pack-quantized", type="float", num_bits=4), "nvfp4-pack-quantized"),
        (compressed("pack-quantized", type="int", num_bits=4, actorder="dynamic"), "reordered"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        (
            compressed("int-quantized") | {"transform_config": {"config_groups": {"u": {}}}},
            "transform_config = {'config_groups': {'u': {}}}",
        ),
        (compressed("int-quantized", of_next_year=2), "of_next_year = 2"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "pre_quant_scale": True}, "pre_quant"),
        ("mine", "quant_method = mine"),
        ({"quant_method": "fp8", "weight_block_size": [0, 16]}, ""),
        ({"quant_method": "fp8", "weight_block_size": [32, 1e400]}, ""),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}},
            "",
        ),
    ],
)
def test_other_forms_are_refused_by_name(settings, words, original, tmp_path):
    source = copy_of(original, tmp_path / "source", config={"quantization_config": settings})
    (problem,) = check_conversion(request_of(source, tmp_path / "out", output_format="huggingface"))
    assert words in problem
    assert "deploy.engine=vllm" in problem


def test_missing_scales_are_named(original, tmp_path):
    source, _ = quantised(original, tmp_path / "source", "block")
    lost = "model.layers.1.mlp.up_proj.weight_scale_inv"
    broken = copy_of(source, tmp_path / "broken", tensors={lost: None})
    assert f"{lost} is missing" in problems_of(
        broken, tmp_path / "out", output_format="huggingface"
    )


MATRIX = "model.layers.0.mlp.up_proj."  # (96, 64)


@pytest.mark.parametrize(
    ("form", "end", "change", "reported"),
    [
        ("block", "weight_scale_inv", lambda each: each[:-1],
         "is fp32 [2, 4]; expected scales of blocks 32 x 16 of [96, 64]"),
        ("block", "weight_scale_inv", lambda each: each.flatten(),
         "is fp32 [12]; expected scales of blocks 32 x 16 of [96, 64]"),
        ("block", "weight_scale_inv", lambda each: each[:0], "is fp32 [0, 4]; expected scales"),
        ("block", "weight_scale_inv", lambda each: each.long(), "is int64 [3, 4]; expected scales"),
        ("block", "weight", lambda each: each.view(torch.uint8),
         "is uint8 [96, 64]; expected fp8 [any, any]"),
        ("tensor", "weight", lambda each: each.float(),
         "is fp32 [96, 64]; expected fp8 [any, any]"),
        ("compressed by row", "weight_scale", lambda each: each[:48],
         "is bf16 [48, 1]; expected scales of blocks 1 x 64 of [96, 64]"),
        ("compressed integers", "weight_scale", lambda each: each.repeat(2, 1),
         "is fp32 [192, 1]; expected scales"),
        ("compressed integers", "weight", lambda each: each[None],
         "is int8 [1, 96, 64]; expected int8 [any, any]"),
        ("packed integers", "weight_scale", lambda each: each[:, :3],
         "is fp16 [96, 3]; expected scales"),
        ("packed integers", "weight_packed", lambda each: each.long(),
         "is int64 [96, 8]; expected int32 [any, any]"),
        ("awq", "scales", lambda each: each[:3], "has 3 groups, which do not divide 64 inputs"),
        ("awq", "qzeros", lambda each: each[:, :5], "is int32 [4, 5]; expected int32 [4, 12]"),
        ("awq", "scales", lambda each: each.T, "is fp16 [96, 4]; expected"),
        ("gptq", "qzeros", lambda each: each[:2], "is int32 [2, 12]; expected int32 [4, 12]"),
        ("gptq", "g_idx", lambda each: each[:-1], "is int32 [63]; expected int32 or int64 [64]"),
        ("gptq", "scales", lambda each: each[:0], "is fp16 [0, 96]; expected"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_named_before_any_work(
    form, end, change, reported, original, tmp_path
):
    source, _ = quantised(original, tmp_path / "source", form)
    name = MATRIX + end
    other = MATRIX.replace("0", "1") + end
    tensors = read_tensors(source)
    changed = {key: change(tensors[key]).clone() for key in (name, other)}
    broken = copy_of(source, tmp_path / "broken", tensors=changed)
    if "groups" in reported:  # their zero points agree
        zeros = {key.replace("scales", "qzeros"): tensors[key.replace("scales", "qzeros")][:3]
                 for key in (name, other)}  # fmt: skip
        broken = copy_of(broken, tmp_path / "agreeing", tensors=zeros)
    problems = check_conversion(request_of(broken, tmp_path / "out", output_format="huggingface"))
    assert len(problems) == 2
    assert f"{broken}: {name} {reported}" in problems[0]
    assert other in problems[1]


@pytest.mark.parametrize("group", [-1, 4])
@pytest.mark.parametrize("is_shards", [False, True])
def test_groups_that_are_not_there_are_named_and_leave_nothing(
    group, is_shards, original, tmp_path
):
    source, _ = quantised(original, tmp_path / "source", "gptq reordered")
    key = MATRIX + "g_idx"
    indices = read_tensors(source)[key].clone()
    indices[5] = group
    broken = copy_of(source, tmp_path / "broken", tensors={key: indices})
    output = tmp_path / "out"
    with pytest.raises(CheckpointMismatchError) as caught:
        (folder_of if is_shards else written)(broken, output)
    assert f"{MATRIX}weight in {broken}: g_idx names groups from" in str(caught.value)
    assert not output.exists()
