"""Dense decoders in Hugging Face's form: one record for each, read in both directions."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from export_scripts.families.dense.huggingface import (
    BIAS_KEYS,
    FULL,
    LLAMA_KEYS,
    LLAMA_NAMES,
    SIZES,
    SLIDING,
    DenseDecoder,
    Window,
    chosen_layers,
)
from export_scripts.families.dense.layout import LAYOUT, DenseConfig
from export_scripts.families.gpt.huggingface import GPT2_KEYS, GPT2_NAMES
from export_scripts.families.layout.decoder import LAYER
from export_scripts.families.mapping.names import (
    QUERY_KEY_VALUE,
    fused_layer,
    named_sources,
    whole_names,
)
from export_scripts.families.mapping.rotary import rotary_parameters
from export_scripts.families.mapping.settings import Settings
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.families.mapping.sources import Copy, Flat, HeadScales, Sources
from foundations.files.json_content import Fields, Table

_BIASES = ("has_mlp_bias", "has_attention_dense_bias", "has_qkv_bias")


def _window_left_out(facts: Facts, _: DenseConfig) -> list[str]:
    window = facts.config.get("sliding_window")
    if window is None:
        return []
    return [f"config.json: sliding_window = {window} is left out: a Llama has none in transformers"]


def _from_max_window_layers(settings: Settings, values: Table) -> list[bool]:
    full = settings.integer("max_window_layers", default=28, least=0)
    return [number >= full for number in range(values["num_layer"])]


_QWEN_WINDOW = Window(4096, has_switch=True, slides=_from_max_window_layers)

# Gemma, Gemma 2 and the text models of Gemma 3; the later two normalise what attention and MLP add.
_GEMMA: Fields = {
    "head_dim": 256,
    "is_tied": True,
    "bos": 2,
    "eos": 1,
}
_GEMMA_FIXED = {
    "norm_one_plus": True,
    "embedding_scale": lambda known: math.sqrt(known["hidden_size"]),
}
_GEMMA_NAMES = {
    **LLAMA_NAMES,
    "attention_output_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_layernorm": "post_feedforward_layernorm",
}


_GEMMA_KEYS = (
    *SIZES, "rms_norm_eps", "hidden_activation", "attention_bias", "query_pre_attn_scalar",
    "final_logit_softcapping",
)  # fmt: skip


def _all_but_every(nth: int, count: int) -> list[bool]:
    return [(number + 1) % nth != 0 for number in range(count)]


def _by_pattern(usual: int) -> Callable[[Settings, Table], list[bool]]:
    return lambda settings, values: _all_but_every(
        settings.integer("sliding_window_pattern", default=usual), values["num_layer"]
    )


def _rotating(settings: Settings, values: Table) -> list[bool]:
    count = values["num_layer"]
    every = settings.integer("no_rope_layer_interval", default=4)
    rotates = settings.source.get("no_rope_layers") or _all_but_every(every, count)
    if not isinstance(rotates, list) or len(rotates) < count:
        settings.note(
            f"no_rope_layers = {rotates!r}: expected an entry for each of the {count} layers"
        )
        return [True] * count
    return [bool(each) for each in rotates[:count]]


def _written_smollm3(config: DenseConfig) -> Fields:
    count = config.num_layer
    rotates = range(count) if config.rotary_layers is None else config.rotary_layers
    return {
        "no_rope_layers": [int(number in rotates) for number in range(count)],
        "pad_token_id": _padding(config),
    }


def _padding(config: DenseConfig) -> int:
    """Return the end: the library's own token may lie beyond a vocabulary, as may that of one."""
    return min(config.end_id, config.vocab_size - 1)


def _check_phi3(settings: Settings, values: Table) -> Fields:
    if values.get("rotary_scaling_type") not in (None, "longrope"):
        settings.note(
            f"rotary scaling {values['rotary_scaling_type']!r} cannot be "
            "represented: transformers takes a Phi-3's for longrope"
        )
    return {}


_FUSED_HALVES = dict.fromkeys(("mlp.dense_h_to_4h", "mlp.dense_h_to_4h_2"), "mlp.gate_up_proj")

_GLM: Fields = {
    "keys": (*LLAMA_KEYS, "attention_bias"),
    "written": lambda config: {"pad_token_id": _padding(config)},
    "head_dim": 128,
    "eos": 151329,
    "rotary_fraction": 0.5,
}
_GLM_FIXED = {"has_attention_dense_bias": False, "rotary_interleaved": True}

# Norms after attention and MLP, and none before.
_ONLY_OUTPUT_NORMS = {"has_input_norms": False, "has_output_norms": True}
_OUTPUT_NORMS = {
    **LLAMA_NAMES,
    "attention_output_layernorm": "post_attention_layernorm",
    "mlp_output_layernorm": "post_feedforward_layernorm",
}


def _written_olmo3(config: DenseConfig) -> Fields:
    """Return the bases by layer: next to each other transformers 5 reads one of them alone."""
    bases = {FULL: config.rotary_base, SLIDING: config.rotary_local_base}
    return {"rope_parameters": {kind: {"rope_theta": base} for kind, base in bases.items()}}


def _kinds(types: Any, most: int) -> list[Any]:
    """Return the kinds of at most so many layers: attention_types are kinds, and their repeats."""
    every = (kind for kinds, times in types for _ in range(times) for kind in kinds)
    return list(itertools.islice(every, most))


def _read_gpt_neo(settings: Settings, values: Table) -> Fields:
    count = values["num_layer"]
    types = settings.value("attention_types", default=[[["global", "local"], 12]])
    try:
        stated = _kinds(types, count + 1)
        kinds = settings.value("attention_layers", default=stated)
        is_known = kinds == stated and {"global", "local"}.issuperset(kinds)
    except (TypeError, ValueError):
        is_known = False
    if not is_known or len(kinds) != count:
        settings.note(
            f"attention_types = {types!r:.100}: expected global or local for each of the {count} "
            "layers, and attention_layers, if stated, the same"
        )
        return {}
    layers = chosen_layers([kind == "local" for kind in kinds])
    window = settings.integer("window_size", default=256)
    return {} if layers == () else {"sliding_window": window, "sliding_layers": layers}


def _written_gpt_neo(config: DenseConfig) -> Fields:
    count = config.num_layer
    layers = range(count) if config.sliding_layers is None else config.sliding_layers
    kinds = [
        "local" if config.sliding_window and number in layers else "global"
        for number in range(count)
    ]
    return {
        "attention_types": [[kinds, 1]],
        "attention_layers": kinds,
        "window_size": config.sliding_window,
    }


def _query_key_norm(kind: str, key: str = "qk_layernorm") -> Callable[[Settings, Table], Fields]:
    return lambda settings, _: {
        "query_key_norm": kind if settings.flag(key, default=False) else None
    }


def _has_query_key_norm(config: DenseConfig) -> Fields:
    return {"qk_layernorm": config.query_key_norm is not None}


def _norms_of_heads(pattern: str) -> Callable[[Facts, DenseConfig], Sources]:
    """Return a function for the sources of norms of queries and keys, each head's its own.

    Their names are q or k and the pattern, in which # stands for the number of the head.
    """

    def sources(_: Facts, config: DenseConfig) -> Sources:
        counts = {"query": config.head_num, "key": config.kv_head_num}
        return {
            f"{LAYER}attention.{name}_norm.weight": HeadScales(
                tuple(
                    dict.fromkeys(
                        f"{LAYER}self_attn.{name[0]}{pattern.replace('#', str(head))}"
                        for head in range(count)
                    )
                ),
                part,
                "#" not in pattern,
            )
            for part, (name, count) in enumerate(counts.items())
        }

    return sources


# Attention and MLP read the same norm, which has no bias; neighbouring dimensions are rotated.
_COHERE: Fields = {
    "keys": (*SIZES, "layer_norm_eps", "hidden_act", "attention_bias", "logit_scale"),
    "fixed": {
        "norm_type": "layernorm",
        "has_norm_bias": False,
        "residual": "parallel_shared",
        "rotary_interleaved": True,
    },
    "is_tied": True,
    "bos": 5,
    "eos": 255001,
}


def _read_cohere(settings: Settings, values: Table) -> Fields:
    source = settings.source
    inside = source.get("rope_scaling") or source.get("rope_parameters")
    stated = inside.get("rope_theta") if isinstance(inside, Mapping) else None
    if source.get("rope_theta", stated) is None:
        settings.note("no rope_theta: transformers 4 takes 10000 and 5 takes 500000; state it")
    return _query_key_norm("heads", "use_qk_norm")(settings, values)


def _read_cohere2(settings: Settings, values: Table) -> Fields:
    if "sliding_window" not in values and "sliding_window" in settings.source:
        settings.note("sliding_window = null: no layer would rotate")
    return {}


def _parameter(settings: Settings, given: Table, name: str) -> Fields:
    """Return one more of the parameters of rotary positions."""
    inner = Settings(given, f"{settings.label}: rotary scaling", settings.problems)
    return {f"rotary_{name}": inner.number(name)}


def _alpha(settings: Settings, values: Table) -> Fields:
    """Return the alpha of a HunYuan, of which dynamic scaling makes a fixed base.

    transformers, modeling_hunyuan_v1_dense.py, compute_ntk_alpha_rope_parameters
    """
    given = rotary_parameters(settings.source)
    if values.get("rotary_scaling_type") != "dynamic" or not given.get("alpha"):
        return {}
    if values["size_per_head"] < 4:
        settings.note(f"alpha with heads of {values['size_per_head']}: expected at least 4")
    return _parameter(settings, given, "alpha")


_MINISTRAL3_ROTARY = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _growth(settings: Settings, values: Table) -> Fields:
    """Return the factor by which a Ministral 3's queries grow, of its rotary parameters."""
    given = rotary_parameters(settings.source) or _MINISTRAL3_ROTARY
    if values.get("rotary_original_max_position_embeddings") is None:
        settings.note(
            f"rotary positions {given!r:.200}: expected yarn, llama3 or longrope, as queries grow "
            "with its original_max_position_embeddings"
        )
        return {}
    return _parameter(settings, given, "llama_4_scaling_beta")


_WITHOUT_GATE = {
    **LLAMA_NAMES, "mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_h_to_4h_2": ""
}  # fmt: skip
_XIELU = {"alpha_p": Copy, "alpha_n": Copy, "beta": Flat, "eps": Flat}

_FALCON_LAYER = "transformer.h.{layer}."
_FALCON_TWO_NORMS = whole_names(
    _FALCON_LAYER, {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
)


def _read_falcon(settings: Settings, values: Table) -> Fields:
    is_new = settings.flag("new_decoder_architecture", default=False)
    is_parallel = settings.flag("parallel_attn", default=True)
    norms = settings.integer("num_ln_in_parallel_attn", default=2 if is_new else 1)
    kv_heads, heads = values["head_num"], values["head_num"]
    if is_new:
        kv_heads = settings.integer("num_kv_heads", default=heads)
        settings.divide(heads, kv_heads, "num_attention_heads by num_kv_heads")
    elif settings.flag("multi_query", default=True):
        kv_heads = 1
    if is_new and not is_parallel:
        settings.note(
            "parallel_attn = false with new_decoder_architecture = true: "
            "transformers has no such model"
        )
    residual = ("parallel_shared", "parallel")[is_new and norms == 2]
    return {
        "kv_head_num": kv_heads,
        "residual": residual if is_new or is_parallel else "sequential",
        **dict.fromkeys(_BIASES, settings.flag("bias", default=False)),
    }


def _written_falcon(config: DenseConfig) -> Fields:
    is_sequential = config.residual == "sequential"
    is_new = config.residual == "parallel" or (not is_sequential and config.kv_head_num > 1)
    return {
        "head_dim": None,
        "new_decoder_architecture": is_new,
        "num_kv_heads": config.kv_head_num,
        "multi_query": config.kv_head_num == 1,
        "parallel_attn": not is_sequential,
        "num_ln_in_parallel_attn": (1 + (config.residual == "parallel")) if is_new else None,
        "bias": config.has_qkv_bias,
    }


_DECODERS = (
    # Every version, with any scaling of rotary positions.
    DenseDecoder(
        model_type="llama",
        model="LlamaForCausalLM",
        title="Llama",
        keys=(*LLAMA_KEYS, *BIAS_KEYS),
        bos=1,
        eos=2,
        warnings=_window_left_out,  # not of fp16, in which Llamas are served everywhere
    ),
    DenseDecoder(
        model_type="mistral",
        model="MistralForCausalLM",
        title="Mistral",
        window=Window(4096),
        bos=1,
        eos=2,
        warnings=lambda *_: [],  # served in fp16 everywhere
    ),
    DenseDecoder(
        model_type="qwen2",
        model="Qwen2ForCausalLM",
        title="Qwen2, Qwen2.5",
        fixed={"has_qkv_bias": True},
        window=_QWEN_WINDOW,
    ),
    DenseDecoder(
        model_type="qwen3",
        model="Qwen3ForCausalLM",
        title="Qwen3",
        keys=(*LLAMA_KEYS, "attention_bias"),
        fixed={"query_key_norm": "head"},
        window=_QWEN_WINDOW,
        head_dim=128,
    ),
    # A Llama with four constant factors.
    DenseDecoder(
        model_type="granite",
        model="GraniteForCausalLM",
        title="Granite",
        keys=(
            *LLAMA_KEYS,
            *BIAS_KEYS,
            "embedding_multiplier",
            "residual_multiplier",
            "attention_multiplier",
            "logits_scaling",
        ),
        bos=1,
        eos=2,
    ),
    # Norms after attention and MLP, not before, and of queries and keys.
    DenseDecoder(
        model_type="olmo2",
        model="Olmo2ForCausalLM",
        title="OLMo 2",
        keys=(*LLAMA_KEYS, "attention_bias"),
        fixed={**_ONLY_OUTPUT_NORMS, "query_key_norm": "all"},
        names=_OUTPUT_NORMS,
        scaling_keys=("type", "factor"),
        eos=50279,
    ),
    DenseDecoder(
        model_type="gemma",
        model="GemmaForCausalLM",
        title="Gemma",
        keys=(*LLAMA_KEYS, "attention_bias"),
        # Older files call its activation gelu, and mean the tanh form.
        fixed={**_GEMMA_FIXED, "exact_gelu": False},
        **_GEMMA,
    ),
    DenseDecoder(
        model_type="gemma2",
        model="Gemma2ForCausalLM",
        title="Gemma 2",
        keys=(*_GEMMA_KEYS, "attn_logit_softcapping"),
        names=_GEMMA_NAMES,
        fixed={**_GEMMA_FIXED, "has_output_norms": True},
        window=Window(4096, slides=lambda _, values: _all_but_every(2, values["num_layer"])),
        **_GEMMA,
    ),
    DenseDecoder(
        model_type="gemma3_text",
        model="Gemma3ForCausalLM",
        title="Gemma 3 text",
        keys=_GEMMA_KEYS,
        names=_GEMMA_NAMES,
        fixed={**_GEMMA_FIXED, "has_output_norms": True, "query_key_norm": "head"},
        window=Window(4096, slides=_by_pattern(6)),
        rotary_base=1e6,
        rotary_local_base=1e4,
        **_GEMMA,
    ),
    # A Llama some of whose layers do not rotate.
    DenseDecoder(
        model_type="smollm3",
        model="SmolLM3ForCausalLM",
        title="SmolLM3",
        keys=(*LLAMA_KEYS, *BIAS_KEYS),
        # A layer that rotates has no window.
        window=Window(
            has_switch=True,
            slides=lambda *given: [not rotates for rotates in _rotating(*given)],
        ),
        read=lambda *given: {"rotary_layers": chosen_layers(_rotating(*given))},
        written=_written_smollm3,
        is_tied=True,
        bos=128000,
        eos=128001,
        rotary_base=2e6,
    ),
    # Fused queries, keys and values, and fused halves of the MLP.
    DenseDecoder(
        model_type="phi3",
        model="Phi3ForCausalLM",
        title="Phi-3, Phi-4",
        names={
            **LLAMA_NAMES,
            **dict.fromkeys(QUERY_KEY_VALUE, "self_attn.qkv_proj"),
            **_FUSED_HALVES,
        },
        rows="blocks",
        scaling_keys=("type", "short_factor", "long_factor"),
        window=Window(),
        read=_check_phi3,
        written=lambda config: {
            "original_max_position_embeddings": (
                config.rotary_original_max_position_embeddings or config.max_pos_seq_len
            ),
            "pad_token_id": _padding(config),
        },
        bos=1,
        eos=32000,
        rotary_fraction=1.0,
    ),
    # Layernorms, biases everywhere, and an MLP without a gate.
    DenseDecoder(
        model_type="starcoder2",
        model="Starcoder2ForCausalLM",
        title="StarCoder2",
        keys=(*SIZES, "norm_epsilon", "hidden_act", "use_bias"),
        fixed={"norm_type": "layernorm"},
        names={**LLAMA_NAMES, "mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj"},
        window=Window(),
        is_gated=False,
        is_tied=True,
        bos=50256,
        eos=50256,
    ),
    # Nemotron and Minitron: layernorm1p, squared ReLU, half-rotated heads.
    DenseDecoder(
        model_type="nemotron",
        model="NemotronForCausalLM",
        title="Nemotron",
        keys=(*SIZES, "norm_eps", "hidden_act", *BIAS_KEYS),
        fixed={"norm_type": "layernorm", "norm_one_plus": True},
        names=_WITHOUT_GATE,
        is_gated=False,
        bos=2,
        eos=3,
        rotary_fraction=0.5,
    ),
    # Learned positions, windows in every second layer, scores that are not scaled.
    DenseDecoder(
        model_type="gpt_neo",
        model="GPTNeoForCausalLM",
        title="GPT-Neo",
        keys=(
            "num_heads",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "vocab_size",
            "max_position_embeddings",
            "layer_norm_epsilon",
            "activation_function",
        ),
        may_lack=("intermediate_size",),
        fixed={
            "norm_type": "layernorm",
            "has_positional_encoding": True,
            "has_attention_dense_bias": True,
            "has_mlp_bias": True,
            "attention_scale": 1.0,
        },
        layer=_FALCON_LAYER,
        names={
            **GPT2_NAMES,
            "attention.query": "attn.attention.q_proj",
            "attention.key": "attn.attention.k_proj",
            "attention.value": "attn.attention.v_proj",
            "attention.dense": "attn.attention.out_proj",
        },
        read=_read_gpt_neo,
        written=_written_gpt_neo,
        is_gated=False,
        is_tied=True,
        bos=50256,
        eos=50256,
        rotary_base=None,
        ignored=("*.attn.attention.bias", "*.attn.attention.masked_bias"),
        prefix="transformer.",
    ),
    # SantaCoder and StarCoder: a GPT-2 with one key head, or as many as queries.
    DenseDecoder(
        model_type="gpt_bigcode",
        model="GPTBigCodeForCausalLM",
        title="GPTBigCode",
        keys=(*GPT2_KEYS, "n_positions", "activation_function"),
        fixed={"norm_type": "layernorm", "has_positional_encoding": True}
        | dict.fromkeys(_BIASES, True),
        layer=_FALCON_LAYER,
        names={**GPT2_NAMES, **dict.fromkeys(QUERY_KEY_VALUE, "attn.c_attn")},
        rows="groups",
        read=lambda settings, values: {
            "kv_head_num": 1 if settings.flag("multi_query", default=True) else values["head_num"],
            "attention_scale": (None if settings.flag("scale_attn_weights", default=True) else 1.0),
        },
        written=lambda config: {
            "multi_query": config.kv_head_num == 1,
            "scale_attn_weights": config.attention_scale is None,
        },
        is_gated=False,
        is_tied=True,
        bos=50256,
        eos=50256,
        rotary_base=None,
        ignored=("*.attn.bias", "*.attn.masked_bias"),
        prefix="transformer.",
    ),
    # Phi 1, 1.5 and 2: attention and MLP read the same norm; biases everywhere, the head's too.
    DenseDecoder(
        model_type="phi",
        model="PhiForCausalLM",
        title="Phi-1, Phi-2",
        keys=(*SIZES, "layer_norm_eps", "hidden_act"),
        fixed={
            "norm_type": "layernorm",
            "residual": "parallel_shared",
            "has_head_bias": True,
            **dict.fromkeys(_BIASES, True),
        },
        names={
            **LLAMA_NAMES,
            "attention.query_norm": "self_attn.q_layernorm",
            "attention.key_norm": "self_attn.k_layernorm",
            "attention.dense": "self_attn.dense",
            "mlp.dense_h_to_4h": "mlp.fc1",
            "mlp.dense_h_to_4h_2": "",
            "mlp.dense_4h_to_h": "mlp.fc2",
            "model.final_layernorm": "model.final_layernorm",
        },
        read=_query_key_norm("head"),
        written=_has_query_key_norm,
        is_gated=False,
        bos=1,
        eos=2,
        rotary_fraction=0.5,
    ),
    # A Llama with layernorms, of heads too, whose attention and MLP may read the same one.
    DenseDecoder(
        model_type="stablelm",
        model="StableLmForCausalLM",
        title="StableLM",
        keys=(*SIZES, "layer_norm_eps", "hidden_act", "use_qkv_bias"),
        fixed={"norm_type": "layernorm"},
        sources=_norms_of_heads("_layernorm.norms.#.weight"),
        read=lambda settings, values: {
            **_query_key_norm("heads")(settings, values),
            "residual": (
                "parallel_shared"
                if settings.flag("use_parallel_residual", default=False)
                else "sequential"
            ),
        },
        written=lambda config: {
            **_has_query_key_norm(config),
            "use_parallel_residual": config.residual == "parallel_shared",
        },
        bos=0,
        eos=0,
        rotary_fraction=0.25,
    ),
    DenseDecoder(
        model_type="cohere",
        model="CohereForCausalLM",
        title="Cohere Command R",
        sources=_norms_of_heads("_norm.weight"),
        read=_read_cohere,
        written=lambda config: {
            "use_qk_norm": config.query_key_norm is not None,
            "pad_token_id": _padding(config),
        },
        **_COHERE,
    ),
    DenseDecoder(
        model_type="cohere2",
        model="Cohere2ForCausalLM",
        title="Cohere 2",
        window=Window(4096, slides=_by_pattern(4), rotates_alone=True),
        read=_read_cohere2,
        written=lambda config: {"pad_token_id": _padding(config)},
        **_COHERE,
    ),
    # 7B, the decoder architecture of 40B and 180B, and RW. Attention and MLP read the same input,
    # through one norm (7B, 11B) or two (40B, 180B); RW is sequential.
    DenseDecoder(
        model_type="falcon",
        model="FalconForCausalLM",
        title="Falcon",
        keys=(
            "num_attention_heads",
            "hidden_size",
            "ffn_hidden_size",
            "num_hidden_layers",
            "vocab_size",
            "max_position_embeddings",
            "layer_norm_epsilon",
            "activation",
        ),
        may_lack=("max_position_embeddings",),
        fixed={"norm_type": "layernorm"},
        layer=_FALCON_LAYER,
        names={
            "model.wte": "transformer.word_embeddings",
            **fused_layer("self_attention"),
            **dict.fromkeys(QUERY_KEY_VALUE, "self_attention.query_key_value"),
            "model.final_layernorm": "transformer.ln_f",
            "model.lm_head": "lm_head",
        },
        # Norms of attention and MLP have names of their own where both read the same input.
        sources=lambda _, config: (
            named_sources(_FALCON_TWO_NORMS, LAYOUT) if config.residual == "parallel" else {}
        ),
        rows="groups",
        read=_read_falcon,
        written=_written_falcon,
        is_gated=False,
        is_tied=True,
        bos=11,
        eos=11,
        prefix="transformer.",
    ),
    DenseDecoder(
        model_type="seed_oss",
        model="SeedOssForCausalLM",
        title="Seed-OSS",
        keys=(*LLAMA_KEYS, "attention_bias", "attention_out_bias", "mlp_bias"),
        head_dim=128,
        bos=0,
        eos=2,
    ),
    # A Llama whose MLP has no gate.
    DenseDecoder(
        model_type="arcee",
        model="ArceeForCausalLM",
        title="Arcee",
        keys=(*LLAMA_KEYS, *BIAS_KEYS),
        names=_WITHOUT_GATE,
        is_gated=False,
        bos=128000,
        eos=128001,
    ),
    DenseDecoder(
        model_type="ministral",
        model="MinistralForCausalLM",
        title="Ministral",
        window=Window(4096, slides=lambda _, values: [True] * values["num_layer"]),
        bos=1,
        eos=2,
    ),
    # Positions rotate neighbouring dimensions of a head.
    DenseDecoder(
        model_type="ernie4_5",
        model="Ernie4_5ForCausalLM",
        title="ERNIE 4.5",
        keys=(*LLAMA_KEYS, "use_bias"),
        fixed={"rotary_interleaved": True},
        head_dim=128,
        is_tied=True,
        bos=1,
        eos=2,
        rotary_base=5e5,
    ),
    DenseDecoder(
        model_type="glm",
        model="GlmForCausalLM",
        title="GLM",
        fixed=_GLM_FIXED,
        names={**LLAMA_NAMES, **_FUSED_HALVES},
        **_GLM,
    ),
    DenseDecoder(
        model_type="glm4",
        model="Glm4ForCausalLM",
        title="GLM 4",
        fixed={**_GLM_FIXED, "has_output_norms": True},
        names={
            **LLAMA_NAMES,
            **_FUSED_HALVES,
            "attention_output_layernorm": "post_self_attn_layernorm",
            "mlp_output_layernorm": "post_mlp_layernorm",
        },
        **_GLM,
    ),
    # OLMo 2 with windows, whose layers rotate without scaling.
    DenseDecoder(
        model_type="olmo3",
        model="Olmo3ForCausalLM",
        title="OLMo 3",
        keys=(*LLAMA_KEYS, "attention_bias"),
        fixed={**_ONLY_OUTPUT_NORMS, "query_key_norm": "all"},
        names=_OUTPUT_NORMS,
        window=Window(4096, slides=lambda _, values: _all_but_every(4, values["num_layer"])),
        written=_written_olmo3,
        eos=50279,
        rotary_base=5e5,
        rotary_local_base=5e5,
        rotary_local_key="rope_theta",
    ),
    DenseDecoder(
        model_type="exaone4",
        model="Exaone4ForCausalLM",
        title="EXAONE 4",
        fixed={**_ONLY_OUTPUT_NORMS, "query_key_norm": "head"},
        names=_OUTPUT_NORMS,
        window=Window(4096, slides=_by_pattern(4), rotates_alone=True),
        bos=0,
        eos=2,
    ),
    # Queries and keys are normalised after their rotation.
    DenseDecoder(
        model_type="hunyuan_v1_dense",
        model="HunYuanDenseV1ForCausalLM",
        title="HunYuan dense",
        keys=(*LLAMA_KEYS, "attention_bias"),
        fixed={"query_key_norm": "head", "query_key_norm_rotated": True},
        names={
            **LLAMA_NAMES,
            "attention.query_norm": "self_attn.query_layernorm",
            "attention.key_norm": "self_attn.key_layernorm",
        },
        read=_alpha,
        bos=1,
        eos=2,
    ),
    # An activation with parameters.
    DenseDecoder(
        model_type="apertus",
        model="ApertusForCausalLM",
        title="Apertus",
        keys=(*SIZES, "rms_norm_eps", "attention_bias"),
        fixed={"query_key_norm": "head", "activation_type": "xielu"},
        names={
            **_WITHOUT_GATE,
            "input_layernorm": "attention_layernorm",
            "post_attention_layernorm": "feedforward_layernorm",
        },
        sources=lambda *_: {
            f"{LAYER}mlp.xielu.{name}": kind(f"{LAYER}mlp.act_fn.{name}")
            for name, kind in _XIELU.items()
        },
        written=lambda _: {"hidden_act": "xielu"},
        is_gated=False,
        bos=1,
        eos=2,
        rotary_base=12e6,
        rotary_usual={
            "rope_type": "llama3",
            "rope_theta": 12e6,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    # Queries grow with their position.
    DenseDecoder(
        model_type="ministral3",
        model="Ministral3ForCausalLM",
        title="Ministral 3 text",
        window=Window(),
        head_dim=128,
        read=_growth,
        bos=1,
        eos=2,
        rotary_usual=_MINISTRAL3_ROTARY,
    ),
)

DENSE_HUGGINGFACE = tuple(decoder.mapping() for decoder in _DECODERS)
