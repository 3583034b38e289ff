"""Folders converted from Hugging Face models give those models' logits, for any tensor parallelism.

Models are random and tiny with sizes that are all different; transformers is the reference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.families.layout.architecture import activation_choice
from export_scripts.families.mapping.settings import ALL_ACTIVATIONS
from export_scripts.ft.reader import FTReader
from inference.parallel.epilogue import activate, gemm_activation
from tests.rank_threads import logits_of
from tests.tiny_transformers import write_model

IDS = [3, 17, 41, 5, 5, 29, 11, 50, 2, 8, 33, 19, 44, 7, 1, 23, 36, 14]

# Relative to the largest logit. Both sides compute in fp32 and differ in the order of sums only:
# some ten products of up to 96 terms in a row, each good to a few units in the last place.
TOLERANCE = 1e-5

COMMON = {"vocab_size": 53, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
GPT2 = {**COMMON, "n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 40}
OPT = {
    **COMMON, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 56,
    "max_position_embeddings": 40, "word_embed_proj_dim": 24,
}  # fmt: skip
BLOOM = {**COMMON, "hidden_size": 24, "n_head": 4, "n_layer": 2}
GPTJ = {**GPT2, "rotary_dim": 4}
NEOX = {
    **COMMON, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
    "intermediate_size": 56, "max_position_embeddings": 40,
}  # fmt: skip
LLAMA = {
    **COMMON, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 56, "max_position_embeddings": 40,
    "tie_word_embeddings": False, "head_dim": 8,
}  # fmt: skip

GRANITE = {
    **{key: value for key, value in LLAMA.items() if key != "head_dim"},
    "hidden_size": 40, "tie_word_embeddings": True, "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.7,
}  # fmt: skip
# A head of 10, which follows from the width.
WIDE = {**{key: value for key, value in LLAMA.items() if key != "head_dim"}, "hidden_size": 40}
OLMO2 = WIDE
PHI3 = {**WIDE, "pad_token_id": 0}
FALCON = {**WIDE, "ffn_hidden_size": 56, "alibi": False, "bias": False}
GEMMA = {**LLAMA, "tie_word_embeddings": True, "num_hidden_layers": 4}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


def longrope(pairs: int, **parameters: Any) -> dict[str, Any]:
    """Return factors of so many pairs, the long ones beyond 10 tokens."""
    return {
        "original_max_position_embeddings": 10,
        **rope(
            "longrope", original_max_position_embeddings=10,
            short_factor=[1 + n / 8 for n in range(pairs)],
            long_factor=[2 + n / 2 for n in range(pairs)], **parameters,
        ),
    }  # fmt: skip


GEMMA3 = {
    **GEMMA, "query_pre_attn_scalar": 20, "sliding_window": 5, "num_hidden_layers": 8,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
LLAMA3 = rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip

# name -> (config class, its settings)
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT2),
    "gpt2-inner": ("GPT2Config", {**GPT2, "n_inner": 56}),
    "gpt2-untied": ("GPT2Config", {**GPT2, "tie_word_embeddings": False}),
    "gpt2-relu": ("GPT2Config", {**GPT2, "activation_function": "relu"}),
    "gpt2-exact-gelu": ("GPT2Config", {**GPT2, "activation_function": "gelu"}),
    "gpt2-eps": ("GPT2Config", {**GPT2, "layer_norm_epsilon": 0.1}),
    "opt": ("OPTConfig", OPT),
    "opt-untied": ("OPTConfig", {**OPT, "tie_word_embeddings": False}),
    "opt-post": ("OPTConfig", {**OPT, "do_layer_norm_before": False}),
    "opt-projected": (
        "OPTConfig", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16}
    ),
    "opt-no-final-norm": ("OPTConfig", {**OPT, "_remove_final_layer_norm": True}),
    "opt-without-biases": (
        "OPTConfig",
        {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False,
         "activation_function": "gelu"},
    ),
    "bloom": ("BloomConfig", BLOOM),
    "bloom-six-heads": ("BloomConfig", {**BLOOM, "n_head": 6, "vocab_size": 131}),
    "bloom-post": ("BloomConfig", {**BLOOM, "apply_residual_connection_post_layernorm": True}),
    "bloom-untied": ("BloomConfig", {**BLOOM, "tie_word_embeddings": False}),
    "gptj": ("GPTJConfig", GPTJ),
    "gptj-wide": ("GPTJConfig", {**GPT2, "n_embd": 144, "n_head": 2, "rotary_dim": 64}),
    "gptj-inner": ("GPTJConfig", {**GPTJ, "n_inner": 56}),
    "gptneox-parallel": ("GPTNeoXConfig", NEOX),
    "gptneox-sequential": ("GPTNeoXConfig", {**NEOX, "use_parallel_residual": False}),
    "gptneox-no-attention-bias": ("GPTNeoXConfig", {**NEOX, "attention_bias": False}),
    "gptneox-fast-gelu": ("GPTNeoXConfig", {**NEOX, "hidden_act": "gelu_fast"}),
    "gptneox-tied": ("GPTNeoXConfig", {**NEOX, "tie_word_embeddings": True}),
    "llama": ("LlamaConfig", {**LLAMA, "head_dim": 6}),
    "llama-no-groups": ("LlamaConfig", {**LLAMA, "num_key_value_heads": 4}),
    "llama-tied": ("LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama-exact-gelu": ("LlamaConfig", {**LLAMA, "hidden_act": "gelu"}),
    "llama-tanh-gelu": ("LlamaConfig", {**LLAMA, "hidden_act": "gelu_pytorch_tanh"}),
    "llama-base": ("LlamaConfig", {**LLAMA, **rope("default", rope_theta=500.0)}),
    "llama-linear": ("LlamaConfig", {**LLAMA, **rope("linear", factor=3.0)}),
    "llama-dynamic": ("LlamaConfig", {**LLAMA, **rope("dynamic", factor=3.0)}),
    "llama-llama3": ("LlamaConfig", {**LLAMA, **LLAMA3}),
    "llama-yarn": (
        "LlamaConfig",
        {**LLAMA, **rope("yarn", factor=2.5, original_max_position_embeddings=16)},
    ),
    "llama-yarn-mscale": (
        "LlamaConfig",
        {**LLAMA, **rope("yarn", factor=2.5, original_max_position_embeddings=16, mscale=0.7,
                         mscale_all_dim=0.3, beta_fast=8.0, truncate=False)},
    ),
    "mistral-window": ("MistralConfig", {**LLAMA, "sliding_window": 5}),
    "mistral-no-window": ("MistralConfig", {**LLAMA, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {**LLAMA, "num_key_value_heads": 2}),
    "qwen2-tied": ("Qwen2Config", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen2-some-windows": (
        "Qwen2Config",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**LLAMA, "head_dim": 6}),
    "qwen3-biases": ("Qwen3Config", {**LLAMA, "attention_bias": True}),
    "granite": ("GraniteConfig", {**GRANITE, "tie_word_embeddings": False}),
    "granite-tied": ("GraniteConfig", GRANITE),
    "olmo2": ("Olmo2Config", OLMO2),
    "olmo2-no-groups": ("Olmo2Config", {**OLMO2, "num_key_value_heads": 4}),
    "gemma2": ("Gemma2Config", {**GEMMA, "query_pre_attn_scalar": 20, "sliding_window": 5}),
    "gemma2-no-caps": (
        "Gemma2Config",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3TextConfig", GEMMA3),
    "smollm3": ("SmolLM3Config", {**WIDE, "no_rope_layers": [1, 0]}),
    "smollm3-biases": ("SmolLM3Config", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "phi3": ("Phi3Config", PHI3),
    "phi3-longrope": ("Phi3Config", {**PHI3, **longrope(5)}),
    "phi3-partial": ("Phi3Config", {**PHI3, **longrope(3, partial_rotary_factor=0.6)}),
    "phi3-window": ("Phi3Config", {**PHI3, "sliding_window": 5}),
    "starcoder2": ("Starcoder2Config", {**WIDE, "sliding_window": 5}),
    "starcoder2-no-biases": ("Starcoder2Config", {**WIDE, "use_bias": False}),
    "nemotron": ("NemotronConfig", {**LLAMA, "hidden_size": 40, "head_dim": 12}),
    "falcon": ("FalconConfig", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-7b": ("FalconConfig", {**FALCON, "multi_query": True, "parallel_attn": True}),
    "falcon-sequential": (
        "FalconConfig", {**FALCON, "multi_query": True, "parallel_attn": False, "bias": True}
    ),
}  # fmt: skip

# Ranks of each run, and how the prompt is cut into steps.
LAYOUTS: dict[tuple[int, int], tuple[int, ...]] = {(1, 1): (), (2, 1): (7, 1, 10), (4, 2): ()}


def build(name: str) -> Any:
    """Return a random model whose every parameter matters: none is left at zero or one."""
    torch.manual_seed(sum(map(ord, name)))
    class_name, settings = MODELS[name]
    config = getattr(transformers, class_name)(**settings, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def check(
    model: Any, source: Path, output_dir: Path, *, tp_size: int = 2, pp_size: int = 1
) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].float()
    ft_dir = convert(
        ConversionRequest(
            checkpoint_path=source, output_dir=output_dir, tp_size=tp_size, weight_data_type="fp32"
        )
    ).ft_dir
    chunks = LAYOUTS[tp_size, pp_size]
    found = logits_of(ft_dir, IDS, tp_size=tp_size, pp_size=pp_size, chunks=chunks)
    assert float((found - expected).abs().max() / expected.abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_folder_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "source")
    check(model, tmp_path / "source", tmp_path / "ft")


LINEAR = {"rope_type": "linear", "factor": 2.0}
# name -> changes of its config.json; None removes a key. transformers reads what is left.
EDITED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "gptj-absent-rotary": ("gptj-wide", {"rotary_dim": None}),
    "neox-old-spelling": (
        "gptneox-parallel",
        {"rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 10000},
    ),
    "llama-old-spelling": (
        "llama", {"rope_parameters": None, "rope_scaling": LINEAR, "rope_theta": 500.0}
    ),
    "llama-both-spellings": ("llama", {"rope_scaling": LINEAR}),
    "llama-window": ("llama", {"sliding_window": 5}),
    "mistral-unused-window": ("mistral-window", {"use_sliding_window": False}),
    "mistral-window-of-few-layers": ("mistral-window", {"max_window_layers": 2}),
    "mistral-absent-window": ("mistral-window", {"sliding_window": None}),
    "qwen2-absent-window-layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": None,
         "layer_types": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITED)
def test_a_configuration_means_what_transformers_takes_it_for(name: str, tmp_path: Path) -> None:
    base, changes = EDITED[name]
    build(base).save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: v for key, v in settings.items() if v is not None}))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "source", attn_implementation="eager"
    )
    check(model, tmp_path / "source", tmp_path / "ft")


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (4, 2)])
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "opt",
        "bloom",
        "gptj",
        "gptneox-parallel",
        "gptneox-sequential",
        "llama",
        "qwen3",
        "granite",
        "olmo2",
        "gemma2",
        "gemma3",
        "smollm3",
        "phi3-longrope",
        "starcoder2",
        "nemotron",
        "falcon",
    ],
)
def test_logits_do_not_depend_on_the_ranks(
    name: str, tp_size: int, pp_size: int, tmp_path: Path
) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "source")
    check(model, tmp_path / "source", tmp_path / "ft", tp_size=tp_size, pp_size=pp_size)


# Windows of 5 and a LongRoPE that begins at 8 positions, both exceeded by the prompt.
TODAYS = (
    "qwen3", "granite", "olmo2", "gemma", "gemma2", "gemma3", "smollm3", "phi3", "starcoder2",
    "nemotron", "falcon", "falcon-bias", "falcon-new", "falcon-one-norm", "falcon-sequential",
)  # fmt: skip


@pytest.mark.parametrize("name", TODAYS)
@pytest.mark.parametrize(("tp_size", "pp_size"), LAYOUTS)
def test_todays_decoders_give_the_log_probabilities_of_transformers(
    name: str, tp_size: int, pp_size: int, tmp_path: Path
) -> None:
    source = write_model(name, tmp_path / "source")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].float().log_softmax(-1)
    ft_dir = convert(ConversionRequest(source, tmp_path / "ft", tp_size, "fp32")).ft_dir
    chunks = LAYOUTS[tp_size, pp_size]
    found = logits_of(ft_dir, IDS, tp_size=tp_size, pp_size=pp_size, chunks=chunks).log_softmax(-1)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "gptj", "gptneox-parallel", "qwen2"])
def test_shards_with_an_index_are_read(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "source", max_shard_size="10KB")
    assert len(list((tmp_path / "source").glob("model-*.safetensors"))) > 1
    check(model, tmp_path / "source", tmp_path / "ft")


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt", "llama-tied", "gptneox-tied"])
def test_bin_file_that_repeats_a_tied_head_is_read(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.config.save_pretrained(tmp_path / "source")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert any(key in state for key in ("lm_head.weight", "embed_out.weight"))
    torch.save(state, tmp_path / "source" / "pytorch_model.bin")
    check(model, tmp_path / "source", tmp_path / "ft")


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt", "llama-tied", "gptneox-tied"])
def test_model_saved_without_its_head_class_is_read(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.base_model.save_pretrained(tmp_path / "source")
    check(model, tmp_path / "source", tmp_path / "ft")


@pytest.mark.parametrize("name", ALL_ACTIVATIONS)
def test_activation_is_the_one_that_transformers_computes(name: str) -> None:
    spelling, exact_gelu = ALL_ACTIVATIONS[name]
    x = torch.linspace(-6, 6, 1001)
    ours = activate(
        x.clone(), gemm_activation(activation_choice(spelling)[0], exact_gelu=exact_gelu)
    )
    # Four units in the last place of the largest value; the two forms of gelu are 5e-4 apart.
    difference = (ours - transformers.activations.ACT2FN[name](x)).abs().max()
    assert float(difference) < 4 * 6 * torch.finfo(torch.float32).eps


def test_key_heads_are_repeated_for_more_ranks_than_heads(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "source")
    request = ConversionRequest(
        checkpoint_path=tmp_path / "source",
        output_dir=tmp_path / "ft",
        tp_size=4,
        weight_data_type="fp32",
    )
    reader = FTReader(convert(request).ft_dir)
    name = "model.layers.0.attention.key.weight"
    heads = [reader.read(name, rank) for rank in range(4)]
    assert torch.equal(heads[0], heads[1])
    assert torch.equal(heads[2], heads[3])
    assert not torch.equal(heads[1], heads[2])
