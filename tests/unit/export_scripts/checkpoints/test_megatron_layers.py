"""Megatron's other forms of a decoder become the folder that megatron-core's GPTModel becomes."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from export_scripts.checkpoints import open_checkpoint
from export_scripts.checkpoints.base import CheckpointReader
from export_scripts.checkpoints.megatron_layers import as_gpt_model
from export_scripts.families.dense.layout import DenseConfig
from export_scripts.families.gpt.megatron import core_traits
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.ft.reader import FTReader
from export_scripts.inspect import describe
from tests.conversions import contents, refusal
from tests.tiny import gpt_tensors, write_megatron
from tests.tiny_distributed import megatron_common
from tests.tiny_huggingface import renamed
from tests.tiny_megatron_core import core_state, write_core
from tests.unit.export_scripts.checkpoints.test_bridge import MODEL, write_bridge
from tests.unit.export_scripts.checkpoints.test_distributed import (
    ARGS,
    CUTS,
    Tensors,
    converted,
    write,
)

LAYERS = 4
SIZES = ARGS | {"num_layers": LAYERS, "virtual_pipeline_model_parallel_size": None}
TP = 2


@pytest.fixture
def state() -> Tensors:
    torch.manual_seed(3)
    found = core_state(layers=LAYERS)
    return {name.removeprefix("model."): tensor for name, tensor in found.items()}


def classic(state: Tensors, tmp_path: Path) -> dict[str, bytes]:
    """Return the folder of the same model from one rank's GPTModel."""
    own = {f"model.{name}": tensor for name, tensor in state.items()}
    source = write_core(tmp_path / "classic.nemo", own, num_layers=LAYERS)
    return contents(converted(source, tmp_path / "classic", TP))


def hybrid(state: Tensors) -> Tensors:
    """Return a model's tensors as HybridModel names them."""
    out = {}
    for name, tensor in state.items():
        start, layers, rest = name.partition("layers.")
        number, _, end = rest.partition(".")
        if layers:
            is_mlp = end.startswith(("mlp.", "pre_mlp"))
            out[f"{start}layers.{2 * int(number) + is_mlp}.{end}"] = tensor
        else:
            out[name.replace("final_layernorm", "final_norm")] = tensor
    return out


def part(tensor: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    """Return a tensor rank's piece; a gated projection has two halves."""
    cut = next((cut for end, cut in CUTS.items() if name.endswith(end)), None)
    if cut is None:
        return tensor
    axis, count = cut
    chunks = tensor.chunk(count, axis)
    return torch.cat(chunks[rank::TP], axis).clone()


def write_parts(
    folder: Path, state: Tensors, depths: Sequence[int], pp_size: int, **args: Any
) -> Path:
    """Write the files of ranks that hold parts of these depths, in the order of the layers."""
    starts = [sum(depths[:number]) for number in range(len(depths))]
    parts: list[Tensors] = [{} for _ in depths]
    for name, tensor in state.items():
        before, layers, rest = name.partition("layers.")
        number, _, end = rest.partition(".")
        if not layers:
            parts[0 if "embedding" in name else -1][name] = tensor
            continue
        place = max(i for i, n in enumerate(starts) if n <= int(number) and depths[i])
        parts[place][f"{before}layers.{int(number) - starts[place]}.{end}"] = tensor
    count = len(depths) // pp_size
    arguments = argparse.Namespace(
        **SIZES
        | {"pipeline_model_parallel_size": pp_size, "virtual_pipeline_model_parallel_size": count}
        | args
    )
    for tp_rank in range(TP):
        for pp_rank in range(pp_size):
            models = {
                f"model{number}": {
                    name: part(tensor, name, tp_rank)
                    for name, tensor in parts[number * pp_size + pp_rank].items()
                }
                for number in range(count)
            }
            rank = folder / f"mp_rank_{tp_rank:02d}_{pp_rank:03d}"
            rank.mkdir(parents=True)
            content = {"args": arguments, "checkpoint_version": 3.0, "iteration": 7, **models}
            torch.save(content, rank / "model_optim_rng.pt")
    return folder


@pytest.mark.parametrize("depths", [(1, 1, 1, 1), (2, 1, 0, 1), (0, 1, 3, 0)])
def test_parts_of_an_interleaved_schedule_are_put_in_order(state, tmp_path, depths):
    """Uneven parts are those of --pipeline-model-parallel-layout and of shorter ends."""
    source = write_parts(tmp_path / "run", state, depths, 2)
    assert contents(converted(source, tmp_path / "out", TP)) == classic(state, tmp_path)


def test_parts_that_the_arguments_do_not_state_are_refused(state, tmp_path):
    source = write_parts(
        tmp_path / "run", state, (1, 1, 1, 1), 2, virtual_pipeline_model_parallel_size=4
    )
    text = refusal(source, tmp_path)
    assert "has the parts model0, model1" in text
    assert "virtual_pipeline_model_parallel_size = 4" in text


def common(**changes: Any) -> dict[str, Any]:
    args = {"num_layers": 2 * LAYERS, "hybrid_layer_pattern": "*-" * LAYERS}
    return megatron_common(**SIZES | args | changes)


def write_hybrid(folder: Path, tensors: Tensors, **changes: Any) -> Path:
    return write(folder, tensors, stacked=False, common=common(**changes))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_hybrid_model_of_a_decoder_s_layers_is_a_decoder(state, tmp_path, prefix):
    """Stages do not matter, and what predicts further tokens is left out."""
    tensors = hybrid(state) | {"mtp.layers.0.eh_proj.weight": torch.ones(2, 4)}
    pattern = "*-*-|*-*-/*-/*-"
    source = write(
        tmp_path / "iter_0000007", tensors, stacked=False, prefix=prefix,
        common=common(
            hybrid_layer_pattern=pattern, mtp_num_layers=2,
            spec=["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
        ),
    )  # fmt: skip
    assert contents(converted(source, tmp_path / "out", TP)) == classic(state, tmp_path)
    facts = describe(source)
    assert facts["family"] == "llama"
    notes = " ".join(facts["notes"])
    assert "left out 1 tensors of multi-token prediction" in notes
    assert f"HybridModel, 4 blocks: {pattern}" in notes


def test_stages_of_a_hybrid_model_may_cut_through_blocks(state, tmp_path):
    pattern = {"hybrid_layer_pattern": "*|-*-|*-*|-", "num_layers": 2 * LAYERS}
    source = write_parts(tmp_path / "run", hybrid(state), (1, 3, 3, 1), 2, **pattern)
    assert contents(converted(source, tmp_path / "out", TP)) == classic(state, tmp_path)


def test_a_hybrid_model_of_megatron_bridge_is_a_decoder(state, tmp_path):
    provider = "megatron.bridge.models.hybrid.hybrid_provider."
    own = {
        "_target_": f"{provider}HybridModelProvider", "num_layers": 2 * LAYERS,
        "hybrid_override_pattern": "*-" * LAYERS, "transformer_layer_spec": None,
        "hybrid_stack_spec": {"_target_": f"{provider}get_default_hybrid_stack_spec"},
        "rotary_base": 10000,
    }  # fmt: skip
    source = write_bridge(tmp_path / "run", hybrid(state), MODEL | own, stacked=False)
    found = contents(converted(source, tmp_path / "out", TP))
    expected = classic(state, tmp_path)
    assert {n: d for n, d in found.items() if n.endswith(".bin")} == {
        n: d for n, d in expected.items() if n.endswith(".bin")
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hybrid_layer_pattern": "M-*-*-*-"}, "is in a layer of Mamba"),
        ({"hybrid_layer_pattern": "M-*-*-G-"}, "M is Mamba"),
        ({"hybrid_layer_pattern": "*-G-*-*-"}, "G is a gated delta network"),
        ({"hybrid_layer_pattern": "+-+-+-+-"}, "+ is multi-latent attention"),
        ({"hybrid_layer_pattern": "*-*-*E**"}, "E is experts"),
        ({"hybrid_layer_pattern": "*"}, "hybrid_layer_pattern = '*'"),
        ({"hybrid_layer_pattern": "--------"}, "hybrid_layer_pattern = '--------'"),
        ({"hybrid_layer_pattern": "*-*-*-*"}, "num_layers = 8"),
        ({"hybrid_layer_pattern": "*-*-*-*x"}, "x is unknown"),
        ({"hybrid_layer_pattern": 8}, "no layers"),
        ({"hybrid_layer_pattern": None}, "without hybrid_layer_pattern"),
        ({"hybrid_layer_pattern": "*-*-"}, "num_layers = 8"),
        ({"hybrid_layer_pattern": "*E*E*E*E", "num_layers": 10}, "num_layers = 10"),
        (
            {"hybrid_layer_pattern": "*-*-*-*-*-", "num_layers": 10},
            "decoder.layers.4.self_attention.linear_qkv.weight is missing",
        ),
        (
            {"hybrid_layer_pattern": "*-*-*-", "num_layers": 6},
            "is beyond the pattern's 6 layers",
        ),
        ({"use_rope_scaling": True}, "use_rope_scaling = True"),
        ({"rotary_interleaved": True}, "rotary_interleaved = True"),
        ({"rotary_seq_len_interpolation_factor": 2}, "rotary_seq_len_interpolation_factor = 2"),
        ({"spec": ["mine", "my_stack_spec"]}, "spec = ['mine', 'my_stack_spec']"),
    ],
)
def test_other_hybrid_models_are_refused_by_name(state, tmp_path, changes, words):
    source = write_hybrid(tmp_path / "iter_0000007", hybrid(state), **changes)
    assert words in refusal(source, tmp_path)


def test_layers_of_another_kind_than_the_pattern_says_are_refused(state, tmp_path):
    swapped = {
        name.replace("layers.2.", "layers.x.").replace("layers.3.", "layers.2."): tensor
        for name, tensor in hybrid(state).items()
    }
    tensors = {name.replace("layers.x.", "layers.3."): tensor for name, tensor in swapped.items()}
    text = refusal(write_hybrid(tmp_path / "iter_0000007", tensors), tmp_path)
    assert re.search(r"decoder\.layers\.2\.mlp\.\S+ is in a layer of attention", text)
    assert re.search(r"decoder\.layers\.3\.self_attention\.\S+ is in a layer of an MLP", text)


@pytest.mark.parametrize(
    ("settings", "windows", "rotary"),
    [
        # Layers are counted from 1 over attention and MLPs: attention has the odd numbers.
        ({"window_size": [7, 0], "window_attn_skip_freq": 3}, (0, 2, 3), None),
        ({"window_size": [7, 0], "window_attn_skip_freq": [0, 1, 1, 0, 0, 1, 1, 0]}, (1, 3), None),
        ({"no_rope_freq": 5}, None, (0, 1, 3)),
        ({"no_rope_freq": [1, 0, 0, 1, 0, 1, 1, 0]}, None, (1, 2)),
    ],
)
def test_settings_of_each_layer_are_those_of_attention(
    state,
    tmp_path,
    settings,
    windows,
    rotary,
):
    source = write_hybrid(tmp_path / "iter_0000007", hybrid(state), **settings)
    config = FTReader(converted(source, tmp_path / "out", TP)).config
    assert isinstance(config, DenseConfig)
    assert (config.sliding_layers, config.rotary_layers) == (windows, rotary)


def test_experts_of_a_hybrid_model_are_those_of_a_mixture(tmp_path):
    attention = {"self_attention.linear_qkv.weight": torch.ones(2, 2)}
    experts = {"mlp.router.weight": torch.ones(2, 2), "pre_mlp_layernorm.weight": torch.ones(2)}
    tensors = {
        f"decoder.layers.{2 * block + is_mlp}.{name}": tensor
        for block in range(2)
        for is_mlp, layer in enumerate((attention, experts))
        for name, tensor in layer.items()
    }
    args = {"hybrid_layer_pattern": "*E*E", "num_layers": 4, "num_experts": 2}
    source = write_hybrid(tmp_path / "iter_0000007", tensors, **args)
    reader = open_checkpoint(source)
    assert set(reader.tensors) == {
        f"decoder.layers.{block}.{name}" for block in range(2) for name in (attention | experts)
    }
    assert (reader.config["num_layers"], reader.config["num_experts"]) == (2, 2)


# Part of a name of megatron-core -> before it.
LEGACY = {
    "embedding.": "language_model.embedding.", "output_layer": "language_model.output_layer",
    "decoder.": "language_model.encoder.", "linear_qkv": "query_key_value",
    "linear_proj": "dense", "pre_mlp_layernorm": "post_attention_layernorm",
    "linear_fc1": "dense_h_to_4h", "linear_fc2": "dense_4h_to_h",
}  # fmt: skip


@pytest.mark.parametrize("norm", ["layernorm", "norm"])
def test_a_llama_in_the_names_before_megatron_core_is_a_decoder(state, tmp_path, norm):
    source = write_parts(tmp_path / "run", state, (2, 2), 2)
    for file in source.glob("*/*.pt"):
        content = torch.load(file, weights_only=False)
        content["model"] = renamed(content.pop("model0"), LEGACY | {"layernorm": norm})
        torch.save(content, file)
    assert contents(converted(source, tmp_path / "out", TP)) == classic(state, tmp_path)


@pytest.mark.parametrize("activation", ["fast-swiglu", "swiglu"])
def test_a_llama_of_nemo_before_megatron_core_is_a_decoder(state, tmp_path, activation):
    """Only one of its spellings of a gate keeps both halves in one tensor."""
    tensors = renamed(state, LEGACY)
    if activation == "swiglu":
        for name in [name for name in tensors if "dense_h_to_4h" in name]:
            second = name.replace("dense_h_to_4h", "dense_h_to_4h_2")
            tensors[name], tensors[second] = tensors[name].chunk(2)
    own = {f"model.{name}": tensor.clone() for name, tensor in tensors.items()}
    source = write_core(
        tmp_path / "model.nemo", own, mcore_gpt=False, num_layers=LAYERS, activation=activation
    )
    assert contents(converted(source, tmp_path / "out", TP)) == classic(state, tmp_path)


def test_rows_of_an_older_order_are_refused_with_rotary_positions(state, tmp_path):
    folder = tmp_path / "run" / "mp_rank_00"
    folder.mkdir(parents=True)
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    content = {
        "args": argparse.Namespace(**SIZES | sizes), "checkpoint_version": 1.0,
        "model": renamed(state, LEGACY),
    }  # fmt: skip
    torch.save(content, folder / "model_optim_rng.pt")
    assert "'checkpoint_version': 1.0" in refusal(folder.parent, tmp_path)


def test_openai_s_gelu_is_not_by_erf_before_megatron_core(tmp_path):
    args = {
        "openai_gelu": True, "bias_gelu_fusion": False, "use_rotary_position_embeddings": True,
        "checkpoint_version": 3.0,
    }  # fmt: skip
    for name, exact in (("language_model.encoder", False), ("decoder", True)):
        reader = CheckpointReader("megatron", tmp_path, args, {f"{name}.layers.0.x": ()}, ())
        facts = Facts(as_gpt_model(reader), tp_size=1, weight_data_type="fp32")
        assert core_traits(facts).exact_gelu is exact


def test_a_gpt_s_norms_are_read_by_either_name(tmp_path):
    tensors = gpt_tensors()
    newer = {name.replace("layernorm", "norm"): tensor for name, tensor in tensors.items()}
    older = write_megatron(tmp_path / "older", tensors)
    found = write_megatron(tmp_path / "newer", newer)
    assert contents(converted(found, tmp_path / "out")) == contents(
        converted(older, tmp_path / "expected")
    )
