"""Adapters written as PEFT folders: peft's model of them against the merge, and against torch."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from export_scripts.conversion.convert import (
    ConversionRequest,
    check_conversion,
    convert,
    folder_problems,
)
from foundations.errors import CheckpointMismatchError
from tests.json_files import read_json
from tests.tiny import (
    TinyGPT,
    gpt_tensors,
    nemo_config,
    write_archive,
    write_nemo,
)
from tests.tiny_distributed import write_distributed
from tests.tiny_megatron_core import core_state, write_core
from tests.tiny_mixtures import core_mixture, with_stacked_experts
from tests.tiny_transformers import write_model
from tests.unit.export_scripts.checkpoints.test_bridge import MODEL, run_config, write_bridge
from tests.unit.export_scripts.conversion.test_lora import (
    ALPHA,
    RANK,
    all_factors,
    bridge_adapter,
    nemo2_adapter,
    write_nemo_adapter,
    write_peft,
)
from tests.unit.export_scripts.conversion.test_mixtures import CONFIG, GIVEN, stacked_layers, write

Factors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
SHORT = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def request(base: Path, out: Path, form: str, *lora: Path, **fields: Any) -> ConversionRequest:
    values = {"allow": ("tokenizer",), "lora_checkpoints": lora, "given": GIVEN, **fields}
    return ConversionRequest(base, out, 1, "fp32", output_format=form, **values)


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model.eval()(torch.arange(3, 23)[None]).logits


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def written(base: Path, whole: Path, tmp: Path, adapter: Path, **fields: Any) -> dict[str, Any]:
    """Compare peft's model with the merge and with a model summed by torch; return the settings."""
    plain = convert(request(base, tmp / "base-out", "huggingface", **fields)).ft_dir
    merged = convert(request(base, tmp / "out", "huggingface", adapter, **fields)).ft_dir
    summed = convert(request(whole, tmp / "whole-out", "huggingface", **fields)).ft_dir
    apart = request(base, tmp / "out", "peft", adapter, **fields)
    assert check_conversion(apart) == []
    folder = convert(apart).ft_dir
    assert folder == tmp / "out" / "peft"
    assert folder_problems(folder) == []
    assert convert(apart).already_done
    expected = logits(summed)
    assert_near(logits(merged), expected)
    assert_near(logits(plain, folder), expected)
    assert (logits(plain) - expected).abs().max() > 0.01 * expected.abs().max()
    return read_json(folder / "adapter_config.json")


def merged_core(state: Mapping[str, torch.Tensor], factors: Factors) -> dict[str, torch.Tensor]:
    """Return a state of megatron-core with products added by torch."""
    out = dict(state)
    for name, (down, up) in factors.items():
        out[name] = state[name] + (up @ down) * (ALPHA / RANK)
    return out


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 2), (2, 2), (4, 1)])
def test_a_nemo_1_adapter_of_any_training_size(tp, pp, tmp_path):
    torch.manual_seed(3)
    state, factors = core_state(), all_factors()
    adapter = write_nemo_adapter(tmp_path / "lora.nemo", factors, tp=tp, pp=pp)
    base = write_core(tmp_path / "base.nemo", state)
    whole = write_core(tmp_path / "whole.nemo", merged_core(state, factors))
    settings = written(base, whole, tmp_path, adapter)
    assert (settings["r"], settings["lora_alpha"]) == (RANK, ALPHA)
    assert settings["target_modules"] == SHORT


@pytest.mark.parametrize("write_adapter", [bridge_adapter, nemo2_adapter])
def test_an_adapter_of_a_distributed_checkpoint(write_adapter, tmp_path):
    torch.manual_seed(3)
    state = {name.removeprefix("model."): tensor for name, tensor in core_state().items()}
    factors = all_factors("")
    base = write_bridge(tmp_path / "base", state)
    whole = write_bridge(tmp_path / "whole", merged_core(state, factors))
    settings = written(base, whole, tmp_path, write_adapter(tmp_path / "iter_0000003", factors))
    assert settings["target_modules"] == SHORT


def some_factors(state: Mapping[str, torch.Tensor], *ends: str, rank: int = RANK) -> Factors:
    return {
        name: (torch.randn(rank, tensor.shape[1]), torch.randn(tensor.shape[0], rank))
        for name, tensor in state.items()
        if name.removesuffix(".weight").endswith(ends)
    }


def adapter_of(folder: Path, tensors: Mapping[str, torch.Tensor], **changes: Any) -> Path:
    """Write Megatron Bridge's checkpoint of an adapter with these tensors."""
    write_distributed(folder, tensors, common={"iteration": 3})
    settings = {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": RANK, "alpha": ALPHA}
    (folder / "run_config.yaml").write_text(run_config(MODEL, peft=settings | changes))
    return folder


def pair(module: str, factors: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        f"{module}.linear_{side}.weight": tensor
        for side, tensor in zip(("in", "out"), factors, strict=True)
    }


def test_modules_of_some_layers_are_named_one_by_one(tmp_path):
    torch.manual_seed(3)
    state = {name.removeprefix("model."): tensor for name, tensor in core_state().items()}
    factors = some_factors(state, "1.mlp.linear_fc1", "linear_proj")
    # A rank of its own, and with it a scale.
    layer = "decoder.layers.0.self_attention.linear_proj.weight"
    factors = {**factors, layer: (torch.randn(2, 32), torch.randn(24, 2))}
    tensors: dict[str, torch.Tensor] = {}
    summed = dict(state)
    for name, (down, up) in factors.items():
        tensors |= pair(name.replace(".weight", ".adapter"), (down, up))
        summed[name] = state[name] + up @ down * (ALPHA / len(down))
    adapter = adapter_of(tmp_path / "iter_0000003", tensors)
    base, whole = (write_bridge(tmp_path / n, s) for n, s in (("base", state), ("whole", summed)))
    settings = written(base, whole, tmp_path, adapter)
    modules = ("mlp.gate_proj", "mlp.up_proj", "self_attn.o_proj")
    named = {f"model.layers.1.{module}" for module in modules} | {"model.layers.0.self_attn.o_proj"}
    assert set(settings["target_modules"]) == named
    assert settings["r"] == RANK


# The rows of a matrix of 4 heads in 2 groups, each of size 8, and of halves of 56, by their part.
INTERLEAVED = {
    "q": [*range(16), *range(32, 48)], "k": [*range(16, 24), *range(48, 56)],
    "v": [*range(24, 32), *range(56, 64)], "gate": [*range(56)], "up": [*range(56, 112)],
}  # fmt: skip
# Those to which NeMo 2 adds the outputs of one training rank, and of two.
IN_A_ROW = INTERLEAVED | {"q": [*range(32)], "k": [*range(32, 48)], "v": [*range(48, 64)]}


def canonical(
    state: Mapping[str, torch.Tensor], rows: Mapping[str, list[int]], prefix: str = ""
) -> tuple[dict[str, tuple[str, Any]], dict[str, torch.Tensor]]:
    """Return factors by layer and part, and the state with their products added to these rows."""
    summed = {name: tensor.clone() for name, tensor in state.items()}
    parts = {}
    for layer in range(2):
        for part, numbers in rows.items():
            module = "mlp.linear_fc1" if part in ("gate", "up") else "self_attention.linear_qkv"
            module = f"{prefix}decoder.layers.{layer}.{module}"
            down, up = torch.randn(RANK, 24) / 4, torch.randn(len(numbers), RANK) / 4
            summed[f"{module}.weight"][numbers] += up @ down * (ALPHA / RANK)
            parts[f"{module} {part}"] = (part, (down, up))
    return parts, summed


@pytest.mark.parametrize("kind", ["bridge", "nemo2", "nemo"])
def test_adapters_of_single_projections(kind, tmp_path):
    torch.manual_seed(3)
    prefix = "model." if kind == "nemo" else ""
    state = {prefix + name.removeprefix("model."): each for name, each in core_state().items()}
    parts, summed = canonical(state, IN_A_ROW if kind == "nemo2" else INTERLEAVED, prefix)
    tensors: dict[str, torch.Tensor] = {}
    for name, (part, factors) in parts.items():
        module = name.partition(" ")[0]
        if kind == "nemo":
            block, _, layer = module.rpartition(".")
            which = "kqv" if layer == "linear_qkv" else "hto4h"
            module = f"{block}.adapter_layer.lora_unfused_{which}_adapter.{part}_adapter"
        else:
            module = f"{module}.adapter.adapter_{part}"
        tensors |= pair(module, factors)
    target = "peft.canonical_lora.CanonicalLoRA"
    fields = {}
    if kind == "nemo":
        lora = {"adapter_dim": RANK, "alpha": ALPHA, "variant": "canonical"}
        section = {"peft_scheme": "lora", "lora_tuning": lora}
        adapter = write_core(tmp_path / "lora.nemo", tensors, peft=section)
        base = write_core(tmp_path / "base.nemo", state)
        whole = write_core(tmp_path / "whole.nemo", summed)
    else:
        base = write_bridge(tmp_path / "base", state)
        whole = write_bridge(tmp_path / "whole", summed)
        adapter = adapter_of(tmp_path / "iter_0000003", tensors, _target_=f"megatron.{target}")
    if kind == "bridge":
        with pytest.raises(CheckpointMismatchError, match="--allow-setting canonical_lora"):
            convert(request(base, tmp_path / "no", "peft", adapter))
        fields["allow_setting"] = ("canonical_lora",)
    if kind == "nemo2":
        adapter = adapter.rename(tmp_path / "weights")
        (adapter / "run_config.yaml").unlink()
        (tmp_path / "lora" / "context").mkdir(parents=True)
        adapter = adapter.rename(tmp_path / "lora" / "weights").parent
        settings = {"_target_": f"nemo.{target}", "dim": RANK, "alpha": ALPHA}
        model = {"_target_": "LlamaModel", "config": {"num_layers": 2}}
        text = yaml.safe_dump(model | {"model_transform": settings})
        (adapter / "context" / "model.yaml").write_text(text)
    found = written(base, whole, tmp_path, adapter, **fields)
    assert found["lora_alpha"] / found["r"] == ALPHA / RANK
    if kind != "nemo2":  # whose keys have queries' rows, too
        assert found["r"] == RANK


def test_a_model_with_fused_projections_and_transposed_matrices(tmp_path):
    torch.manual_seed(3)
    model = TinyGPT()
    tensors = gpt_tensors(model)
    names = [key for key in tensors if key.endswith("query_key_value.weight")]
    state: dict[str, torch.Tensor] = {}
    summed = dict(tensors)
    for name in names:
        block = name.removesuffix("query_key_value.weight") + "adapter_layer."
        down, up = torch.randn(RANK, model.hidden), torch.randn(len(tensors[name]), RANK)
        state |= pair(f"{block}lora_kqv_adapter", (down, up))
        summed[name] = tensors[name] + up @ down
    peft_section = {"peft_scheme": "lora", "lora_tuning": {"adapter_dim": RANK}}
    settings = nemo_config(model) | {"peft": peft_section, "tokenizer": None}
    adapter = write_archive(tmp_path / "lora.nemo", settings, state)
    base = write_nemo(tmp_path / "base.nemo", tensors, model)
    whole = write_nemo(tmp_path / "whole.nemo", summed, model)
    found = written(base, whole, tmp_path, adapter)
    assert found["fan_in_fan_out"] is True
    assert found["target_modules"] == ["c_attn"]


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_have_their_own_updates(name, tmp_path):
    torch.manual_seed(3)
    original = write_model(name, tmp_path / "original")
    count, width = (4, 56) if name == "mixtral" else (6, 20)
    model = {**CONFIG} | {"num_moe_experts": count, "moe_router_topk": count // 2}
    model |= {"moe_ffn_hidden_size": width, "qk_layernorm": name != "mixtral"}
    if name == "mixtral":
        model |= {"layernorm_epsilon": 1e-5, "rotary_base": 1000000.0}
    state = with_stacked_experts(core_mixture(original))
    summed, tensors = dict(state), dict[str, torch.Tensor]()
    for layer in range(2):
        for matrix in ("linear_fc1", "linear_fc2"):
            weight = f"decoder.layers.{layer}.mlp.experts.experts.{matrix}.weight"
            _, rows, columns = state[weight].shape
            factors = torch.randn(count, RANK, columns), torch.randn(count, rows, RANK)
            factors = factors[0] / 4, factors[1] / 4
            summed[weight] = state[weight] + factors[1] @ factors[0] * (ALPHA / RANK)
            tensors |= pair(f"decoder.layers.{layer}.mlp.experts.{matrix}.adapter", factors)
    provider = "megatron.bridge.models.qwen.qwen_provider.Qwen3MoEModelProvider30B_A3B"
    run = yaml.safe_dump({"model": {"_target_": provider, **model}, "tokenizer": {}})
    for folder, each in (("base", state), ("whole", summed)):
        write(tmp_path / folder, stacked_layers(each), {})
        (tmp_path / folder / "run_config.yaml").write_text(run)
    adapter = adapter_of(tmp_path / "iter_0000003", stacked_layers(tensors))
    given = (*GIVEN, ("normalized_routing", "True"))
    written(tmp_path / "base", tmp_path / "whole", tmp_path, adapter, given=given)


def test_the_folder_is_of_the_type_asked_for(tmp_path):
    state, factors = core_state(), all_factors()
    adapter = write_nemo_adapter(tmp_path / "lora.nemo", factors, tp=1, pp=1)
    base = write_core(tmp_path / "base.nemo", state)
    asked = request(base, tmp_path / "out", "peft", adapter)
    folder = convert(dataclasses.replace(asked, weight_data_type="bf16")).ft_dir
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    down = factors["model.decoder.layers.0.mlp.linear_fc2.weight"][0].bfloat16()
    found = tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"]
    assert torch.equal(found, down)


def test_the_rest_is_refused(tmp_path):
    adapter = write_nemo_adapter(tmp_path / "lora.nemo", all_factors(), tp=1, pp=1)
    base = write_core(tmp_path / "base.nemo", core_state())
    for lora in ((), (adapter, adapter)):
        (problem,) = check_conversion(request(base, tmp_path / "out", "peft", *lora))
        assert "--output-format=peft" in problem
    llama = write_model("llama", tmp_path / "llama")
    own = write_peft(tmp_path / "own", llama, r=4, target_modules=["q_proj"])
    (problem,) = check_conversion(request(llama, tmp_path / "out", "peft", own))
    assert "adapter_config.json" in problem
    assert not (tmp_path / "out").exists()
