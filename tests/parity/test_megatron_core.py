"""Checkpoints made by megatron-core's own GPTModel give that model's logits, for any TP."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from export_scripts.conversion.convert import ConversionRequest, convert
from tests.conversions import folder_of
from tests.json_files import read_json
from tests.looks import relative_error
from tests.rank_threads import logits_of
from tests.tiny_transformers import MODELS
from tests.unit.export_scripts.checkpoints.test_bridge import write_bridge

# Relative to the largest logit; fp32 on both sides, in another order of summation.
TOLERANCE = 1e-5


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt_tp1", "gpt_tp2", "llama_tp1", "llama_tp2"])
def test_folder_gives_the_recorded_logits(shared, tmp_path, name, tp_size):
    case = shared / "golden" / "gpt_mcore" / name
    prompt = read_json(case / "greedy.json")["prompt"]
    expected = np.load(case / "logits.npy")
    request = ConversionRequest(
        checkpoint_path=case / "source" / "model.nemo",
        output_dir=tmp_path,
        tp_size=tp_size,
        weight_data_type="fp32",
    )
    summary = convert(request)
    assert summary.family == name.split("_")[0]
    found = logits_of(summary.ft_dir, prompt, tp_size=tp_size, pp_size=1)
    assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_hybrid_model_gives_the_recorded_logits(shared, tmp_path, tp_size):
    case = shared / "golden" / "hybrid" / "llama_2_blocks"
    recorded = np.load(case / "logits.npz")
    prompt, expected = recorded["ids"].ravel().tolist(), recorded["logits"]
    given = (("start_id", "1"), ("end_id", "2"))
    shards = folder_of(case, tmp_path / "out", tp_size=tp_size, given=given)
    found = logits_of(shards, prompt, tp_size=tp_size, pp_size=1)
    assert relative_error(found, expected) < TOLERANCE


IDS = [3, 17, 41, 5, 5, 29, 11, 50, 2, 8, 33, 19, 44, 7, 1, 23, 36, 14]
# Megatron Bridge's settings for each model in tests.tiny_transformers, but its sizes.
GEMMAS: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": {
        "window_size": [4, 0], "query_pre_attn_scalar": 11, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "window_size": 5, "interleaved_attn_pattern": [1, 1], "rotary_base": [10000, 1000000],
        "softmax_scale": 1 / 256**0.5, "qk_layernorm": True, "rope_scaling_factor": 1.0,
    },
    "gemma3-kinds": {
        "window_size": 5, "rotary_base": [10000, 1000000], "softmax_scale": 1 / 256**0.5,
        "interleaved_attn_pattern": ["sliding_attention", "full_attention"],
        "qk_layernorm": True, "rope_scaling_factor": 2.0,
    },
}  # fmt: skip
# Module of a layer in transformers, without ".weight" -> tensor of megatron-core.
RENAMED = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_weight",
    "self_attn.o_proj": "self_attention.linear_proj.weight",
    "self_attn.q_norm": "self_attention.q_layernorm.weight",
    "self_attn.k_norm": "self_attention.k_layernorm.weight",
    "mlp.down_proj": "mlp.linear_fc2.weight",
}
# A Gemma's, and its successors'.
NORMS = {"post_attention_layernorm": "mlp.linear_fc1.layer_norm_weight"}
NORMS2 = {
    "pre_feedforward_layernorm": "mlp.linear_fc1.layer_norm_weight",
    "post_attention_layernorm": "self_attention.linear_proj.post_layernorm.weight",
    "post_feedforward_layernorm": "mlp.linear_fc2.post_layernorm.weight",
}


def in_core(model: Any, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return a Gemma's tensors as megatron-core has them."""
    found, config = model.state_dict(), model.config
    out = {
        "embedding.word_embeddings.weight": found["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": found["model.norm.weight"],
    }
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        out |= {
            ours + core: found[f"{theirs}{name}.weight"]
            for name, core in (RENAMED | names).items()
            if f"{theirs}{name}.weight" in found
        }
        heads = [
            found[f"{theirs}self_attn.{part}_proj.weight"].view(
                config.num_key_value_heads, -1, config.head_dim, config.hidden_size
            )
            for part in "qkv"
        ]
        out[ours + "self_attention.linear_qkv.weight"] = torch.cat(heads, dim=1).flatten(0, 2)
        halves = [found[f"{theirs}mlp.{half}_proj.weight"] for half in ("gate", "up")]
        out[ours + "mlp.linear_fc1.weight"] = torch.cat(halves)
    return out


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", GEMMAS)
def test_a_gemma_of_megatron_bridge_gives_the_logits_of_transformers(name, tp_size, tmp_path):
    settings, version = GEMMAS[name], name[5:6]
    kind, sizes = MODELS[name.split("-")[0]]
    scaled: dict[str, Any] = {"num_hidden_layers": 2}
    if version == "3":
        scaled["layer_types"] = ["sliding_attention", "full_attention"]
    if (factor := settings.get("rope_scaling_factor", 1)) != 1:
        full = {"rope_type": "linear", "rope_theta": 1e6, "factor": factor}
        local = {"rope_type": "default", "rope_theta": 1e4}
        scaled["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    torch.manual_seed(0)
    class_ = getattr(transformers, kind)
    model = class_(class_.config_class(**{**sizes, **scaled}))
    for norm in (each for key, each in model.named_parameters() if "norm" in key):
        torch.nn.init.normal_(norm, std=0.3)
    module = f"megatron.bridge.models.gemma.gemma{version}_provider."
    config = model.config
    state = in_core(model.eval(), NORMS2 if version else NORMS)
    layers = f"{module}gemma{version}_layer_spec" if version else "x.default_layer_spec"
    source = write_bridge(
        tmp_path / "run",
        state,
        {
            "_target_": f"{module}Gemma{version}ModelProvider", "normalization": "RMSNorm",
            "layernorm_zero_centered_gamma": True, "layernorm_epsilon": config.rms_norm_eps,
            "num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size,
            "ffn_hidden_size": config.intermediate_size, "kv_channels": config.head_dim,
            "num_attention_heads": config.num_attention_heads, "gated_linear_unit": True,
            "num_query_groups": config.num_key_value_heads, "position_embedding_type": "rope",
            "seq_length": config.max_position_embeddings, "add_bias_linear": False,
            "activation_func": {"_target_": "megatron.core.activations.fast_gelu", "_call_": False},
            "share_embeddings_and_output_weights": True, "rotary_base": 10000,
            "transformer_layer_spec": {"_target_": layers, "_call_": False}, **settings,
        },
    )  # fmt: skip
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    shards = folder_of(source, tmp_path / "out", tp_size=tp_size)
    found = logits_of(shards, IDS, tp_size=tp_size, pp_size=1)
    assert relative_error(found, expected) < TOLERANCE
    if tp_size > 1:
        return
    left = class_.from_pretrained(
        folder_of(source, tmp_path / "hf", output_format="huggingface", allow=("tokenizer",))
    )
    with torch.no_grad():
        torch.testing.assert_close(left(torch.tensor([IDS])).logits[0], expected)
