"""The T5 layout from Hugging Face: T5, T5-v1.1, flan-T5, mT5, UL2, and encoders.

Names: transformers, models/t5/modeling_t5.py.
"""

import dataclasses

from export_scripts.families.mapping.huggingface import (
    HuggingFaceSettings,
    activation_name,
)
from export_scripts.families.mapping.known_settings import huggingface_obstacles
from export_scripts.families.mapping.names import named_sources
from export_scripts.families.mapping.settings import HUGGINGFACE_ACTIVATIONS, Settings, model_name
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Copy, Sources
from export_scripts.families.t5.layout import (
    DECODER_SELF,
    HEAD,
    LAYOUT,
    T5,
    T5_ENCODER,
    T5Config,
    t5_warnings,
)
from foundations.files.json_content import Fields

_EMBEDDING = "shared.weight"
# Copies of the embedding that a file may hold in addition to shared.weight, or instead of it.
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# model_type -> prefix of its classes.
_MODEL_TYPES = {"t5": "T5", "mt5": "MT5"}

# Settings that NVIDIA's converter copies, but no loader reads.
_COPIED = ("dropout_rate", "initializer_factor", "n_positions")


def _is_encoder(facts: Facts) -> bool:
    # A whole T5 matches, too: the user may want only its encoder.
    return facts.config.get("model_type") in _MODEL_TYPES


def _embedding_key(facts: Facts) -> str:
    return next((key for key in (_EMBEDDING, *_COPIES) if facts.has(key)), _EMBEDDING)


def _reasons(facts: Facts) -> list[str]:
    whole = _embedding_key(facts)
    return [
        f"{key} differs from {whole}: FT's T5 has one embedding for both stacks"
        for key in _COPIES
        if facts.has(whole) and facts.has(key) and not facts.same_values(key, whole)
    ]


def _feed_forward(facts: Facts) -> tuple[str, bool]:
    """Return transformers' activation, and whether the MLP is gated.

    dense_act_fn and is_gated_act override the key from which they are usually derived.
    """
    source = facts.config
    usual = "gated-gelu" if source["model_type"] == "mt5" else "relu"
    stated = str(source.get("feed_forward_proj") or usual)
    activation = "gelu_new" if stated == "gated-gelu" else stated.removeprefix("gated-")
    return (
        str(source.get("dense_act_fn", activation)),
        bool(source.get("is_gated_act", stated.startswith("gated-"))),
    )


def _token(settings: Settings, name: str, *, default: int) -> int:
    token = settings.token(name, settings.get(name))
    return default if token is None else token


# Settings of an encoder; the last is only a decoder's.
_KEYS = (
    "vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "num_layers",
    "relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon",
    "num_decoder_layers",
)  # fmt: skip


def _settings(kind: str, *, has_decoder: bool) -> HuggingFaceSettings:
    return HuggingFaceSettings(kind, _KEYS if has_decoder else _KEYS[:-1], models="t5")


def _config(facts: Facts, *, has_decoder: bool) -> T5Config:
    source = facts.config
    settings = Settings(source)
    activation, is_gated = _feed_forward(facts)
    if activation not in HUGGINGFACE_ACTIVATIONS:
        key = "dense_act_fn" if "dense_act_fn" in source else "feed_forward_proj"
        settings.note(
            f"{key} = {source[key]} cannot be represented; known: "
            f"{', '.join(HUGGINGFACE_ACTIVATIONS)}, in feed_forward_proj also after gated-"
        )
    spelling, exact_gelu = HUGGINGFACE_ACTIVATIONS.get(activation, ("", False))
    values = _settings(source["model_type"], has_decoder=has_decoder).read(settings)
    pad = _token(settings, "pad_token_id", default=0)
    start = _token(settings, "decoder_start_token_id", default=pad)
    eos = _token(settings, "eos_token_id", default=1)
    if has_decoder:
        values.setdefault("num_decoder_layers", values["num_layers"])
        values["tie_word_embeddings"] = _scales_logits(settings)
        if not settings.flag("is_encoder_decoder", default=True):
            settings.note(
                "is_encoder_decoder = false, but the checkpoint holds a decoder, which would "
                "compute something else: set it to true, or convert only the encoder (t5_encoder)"
            )
    return settings.build_config(
        T5Config,
        facts,
        name_or_path=model_name(source, "t5"),
        feed_forward_proj=("gated-" if is_gated else "") + spelling.lower(),
        exact_gelu=exact_gelu,
        relative_attention_num_buckets_or_max_pos_seq_len=values.pop("positions"),
        use_gated_activation=is_gated,
        has_lm_head=has_decoder,
        decoder_start_token_id=start,
        eos_token_id=eos,
        pad_id=pad,
        **{key: source[key] for key in _COPIED if isinstance(source.get(key), int | float)},
        **values,
    )


def _written(config: T5Config, is_tied: bool) -> list[Fields]:  # noqa: ARG001
    """Return candidates of config.json; tie_word_embeddings means scaled logits here."""
    name = activation_name(config.feed_forward_proj, exact_gelu=config.exact_gelu)
    if config.use_gated_activation:
        # With a gate, transformers takes the name gelu for gelu_new.
        name = f"gated-{'gelu_python' if name == 'gelu' else name}"
    is_encoder = config.is_encoder_only
    suffix = "EncoderModel" if is_encoder else "ForConditionalGeneration"
    return [
        {
            "model_type": kind,
            "architectures": [model + suffix],
            **_settings(kind, has_decoder=not is_encoder).written(config),
            "feed_forward_proj": name,
            "is_encoder_decoder": not is_encoder,
            "tie_word_embeddings": config.tie_word_embeddings,
            "decoder_start_token_id": config.start_id,
            "eos_token_id": config.end_id,
            "pad_token_id": config.pad_id,
        }
        for kind, model in _MODEL_TYPES.items()
    ]


def _scales_logits(settings: Settings) -> bool:
    """Return whether the logits are divided by sqrt(d_model), as tied heads once implied.

    transformers 5 ties every head, has a separate key for a T5's scaling, and never scales an mT5;
    transformers 4 scales if the head is tied.
    """
    is_mt5 = settings.get("model_type") == "mt5"
    version = str(settings.get("transformers_version", "4")).split(".")[0]
    if is_mt5 and version.isdigit() and int(version) >= 5:
        return False
    tied = settings.flag("tie_word_embeddings", default=not is_mt5)
    return settings.flag("scale_decoder_outputs", default=tied)


def _warnings(facts: Facts, config: T5Config) -> list[str]:
    is_scaled = config.tie_word_embeddings and not config.is_encoder_only
    if facts.config["model_type"] != "mt5" or not is_scaled:
        return t5_warnings(facts, config)
    return [
        *t5_warnings(facts, config),
        "transformers 4, which wrote this mT5, divides its logits by sqrt(d_model), as the head is "
        "tied, but transformers 5 does not: the FT folder divides them; if the model was trained "
        "with 5, state --set tie_word_embeddings=False",
    ]


def _weights(facts: Facts, config: T5Config) -> Sources:
    """Return each tensor's source; most names are those of the layout."""
    names: Fields = {
        (module := spec.name.rpartition(".")[0]): module
        for spec in LAYOUT
        if spec.name.startswith(("encoder.", "decoder."))
    }
    if config.use_gated_activation:
        gates = {"wi": "wi_0", "wi2": "wi_1"}
        names |= {
            module: f"{mlp}.{gates[name]}"
            for module in names
            for mlp, _, name in [module.rpartition(".")]
            if name in gates
        }
    names[f"{DECODER_SELF}.qkv"] = tuple(f"{DECODER_SELF}.{part}" for part in "qkv")
    # A missing head is reported later.
    has_own_head = facts.has(HEAD) or facts.config.get("tie_word_embeddings") is False
    return {
        **named_sources(names, LAYOUT),
        "shared.weight_T": Copy(_embedding_key(facts)),
        # Also written for tied models, so that FT needs no rule for them.
        HEAD: Copy(HEAD if has_own_head else _embedding_key(facts)),
    }


_SHARED_IGNORED = (
    *_COPIES,
    # Early T5 files hold a second, unused table.
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
)

T5_HUGGINGFACE = SourceMapping(
    name="huggingface-t5",
    title="Hugging Face T5, T5-v1.1, flan-T5, mT5, UL2",
    family=T5,
    format="huggingface",
    matches=lambda facts: _is_encoder(facts) and facts.has_any("decoder.block.*"),
    config=lambda facts: _config(facts, has_decoder=True),
    written=_written,
    weights=_weights,
    unsupported=_reasons,
    obstacles=huggingface_obstacles,
    ignored=_SHARED_IGNORED,
    warnings=_warnings,
)

T5_ENCODER_HUGGINGFACE = dataclasses.replace(
    T5_HUGGINGFACE,
    name="huggingface-t5-encoder",
    title="Hugging Face T5EncoderModel, or the encoder of a whole T5",
    family=T5_ENCODER,
    matches=_is_encoder,
    config=lambda facts: _config(facts, has_decoder=False),
    ignored=(*_SHARED_IGNORED, "decoder.*", HEAD),
)
