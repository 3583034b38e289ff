"""The T5 layout and its config.ini: T5, T5-v1.1, flan, mT5, UL2, Megatron T5, and encoders.

Layout: FasterTransformer, models/t5/T5EncoderWeight.cc, T5DecodingWeight.cc and their layer
weights (5.3 line). Encoder and decoder layers are numbered separately.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from export_scripts.families.layout.architecture import (
    EncoderDecoderArchitecture,
    activation_choice,
)
from export_scripts.families.layout.config import FTConfig, Sections, ini_field
from export_scripts.families.layout.spec import ModelFamily, layout_table

HEAD = "lm_head.weight"

# Hard-wired in FasterTransformer's T5.
FT_MAX_DISTANCE = 128
FT_NORM_EPS = 1e-6

_BOTH = ("encoder", "decoder")
_DECODER_FIELDS = (
    "num_decoder_layers", "decoder_start_token_id", "eos_token_id", "pad_id", "tie_word_embeddings",
    "has_lm_head",
)  # fmt: skip
_STRUCTURE_FIELDS = (
    "t5_with_bias", "use_gated_activation", "exact_gelu", "position_embedding_type",
    "ia3_num_tasks", "ia3_adapted",
)  # fmt: skip
_SHARED_FIELDS = (
    "name_or_path", "weight_data_type", "tensor_para_size", "vocab_size", "d_model", "d_kv", "d_ff",
    "num_heads", "feed_forward_proj", "relative_attention_num_buckets_or_max_pos_seq_len",
    "relative_attention_max_distance", "layer_norm_epsilon", "has_adapter", "adapter_inter_size",
    "adapter_norm_position", "model_type", "dropout_rate", "initializer_factor", "n_positions",
)  # fmt: skip


def _token(key: str) -> Any:
    """Return the field of a token; without a decoder, the key is in [encoder]."""

    def of_encoder(sections: Sections, _: Collection[str]) -> int | None:
        text = sections.get("encoder", {}).get(key, "")
        return int(text) if text.isdecimal() else None

    return ini_field(None, absent=of_encoder)


@dataclass(frozen=True, kw_only=True)
class T5Config(FTConfig):
    """config.ini [encoder], [decoder] and [structure]; only an encoder: no decoder layers.

    Absent keys have the loader's defaults.
    """

    SECTION: ClassVar[str] = "encoder"
    EXTRA_SECTIONS: ClassVar[tuple[str, ...]] = ("decoder", "structure")
    PLACES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(_DECODER_FIELDS, ("decoder",)),
        **dict.fromkeys(_STRUCTURE_FIELDS, ("structure",)),
        **dict.fromkeys(_SHARED_FIELDS, _BOTH),
    }
    INDICES: ClassVar[Mapping[str, str]] = {
        "encoder_layer": "num_layers",
        "decoder_layer": "num_decoder_layers",
    }

    name_or_path: str = ini_field(key="_name_or_path")
    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_heads: int
    num_layers: int
    num_decoder_layers: int = ini_field(0, key="num_layers")
    feed_forward_proj: str
    relative_attention_num_buckets_or_max_pos_seq_len: int
    # FT does not read these two and has only these values; other engines read them.
    relative_attention_max_distance: int = FT_MAX_DISTANCE
    layer_norm_epsilon: float = FT_NORM_EPS
    decoder_start_token_id: int | None = _token("decoder_start_token_id")
    eos_token_id: int | None = _token("eos_token_id")
    pad_id: int | None = None
    # In a model without biases: whether the logits are divided by sqrt(d_model).
    tie_word_embeddings: bool = True
    # Not an FT key: distinguishes a missing lm_head.weight.bin from a tied head.
    has_lm_head: bool = ini_field(
        True,
        absent=lambda sections, files: bool(sections.get("decoder")) and f"{HEAD}.bin" in files,
    )
    has_adapter: bool | None = None
    adapter_inter_size: int = 0
    adapter_norm_position: str | None = None
    t5_with_bias: bool = False
    use_gated_activation: bool = False
    # Not an FT key (FT computes the tanh form): gelu by erf.
    exact_gelu: bool = False
    position_embedding_type: str = "relative"
    ia3_num_tasks: int = 0
    ia3_adapted: bool | None = None
    # No loader reads these; NVIDIA's converter also calls an mT5 t5.
    model_type: str = "t5"
    dropout_rate: float | None = None
    initializer_factor: float | None = None
    n_positions: int | None = None

    def problems(self) -> list[str]:
        """Return also a problem if the formula of a relative bias's far buckets fails."""
        buckets, reach = self.positions, self.relative_attention_max_distance
        if not self.is_relative or 4 <= buckets < 2 * reach:
            return super().problems()
        return [
            *super().problems(),
            f"relative_attention_num_buckets = {buckets} with relative_attention_max_distance "
            f"= {reach} cannot be represented: expected at least 4 buckets, and fewer than "
            "twice the distance",
        ]

    @property
    def inner(self) -> int:
        """The attention width, which may differ from d_model."""
        return self.num_heads * self.d_kv

    @property
    def positions(self) -> int:
        """The number of rows of the table of biases or positions."""
        return self.relative_attention_num_buckets_or_max_pos_seq_len

    @property
    def is_relative(self) -> bool:
        """Whether positions are relative; the loader takes any other value for absolute."""
        return self.position_embedding_type == "relative"

    @property
    def is_encoder_only(self) -> bool:
        """Whether the model has no decoder."""
        return self.num_decoder_layers == 0

    @property
    def start_id(self) -> int | None:
        """The first token of the decoder."""
        return self.decoder_start_token_id

    @property
    def end_id(self) -> int | None:
        """The token that ends a sequence."""
        return self.eos_token_id

    def sections(self) -> Sections:
        """Return the sections of config.ini; [decoder] is empty if there is no decoder.

        NVIDIA's clients read settings of the whole model from either side, so both have them.
        """
        out = super().sections()
        decoder = out["decoder"]
        copied = {key: decoder[name] for key, name in _COPIED_KEYS.items() if name in decoder}
        copied |= {"is_encoder_decoder": "False", "is_gated_act": str(self.use_gated_activation)}
        for side in _BOTH:
            is_decoder = str(side == "decoder")
            out[side] |= copied | {"is_decoder": is_decoder, "use_cache": is_decoder}
        if self.is_encoder_only:
            out["decoder"] = {}
            del out["encoder"]["num_decoder_layers"]
        return out

    @classmethod
    def from_sections(cls, sections: Sections, files: Collection[str] = ()) -> T5Config:
        """Return the config from parsed sections.

        Raises:
            ValueError: Keys are missing or unreadable, or encoder and decoder disagree.
        """
        encoder, decoder = sections.get("encoder", {}), sections.get("decoder", {})
        problems = [
            f"config.ini {key} = {encoder[key]} in [encoder] but {decoder[key]} in [decoder]"
            for key in _SHARED_KEYS
            if key in encoder and key in decoder and encoder[key] != decoder[key]
        ]
        if decoder:
            problems += [
                f"config.ini [decoder] has no {key}" for key in _DECODER_KEYS if key not in decoder
            ]
        if problems:
            raise ValueError("\n".join(problems))
        return super().from_sections(sections, files)

    def architecture(self) -> EncoderDecoderArchitecture:
        """Return the encoder-decoder, or the encoder."""
        activation, gated_spelling = activation_choice(self.feed_forward_proj)
        if gated_spelling and not self.use_gated_activation:
            raise ValueError(
                f"feed_forward_proj = {self.feed_forward_proj} is gated, but "
                "use_gated_activation is false in [structure]"
            )
        bias = self.t5_with_bias
        return self.build_architecture(
            EncoderDecoderArchitecture,
            head_num=self.num_heads,
            size_per_head=self.d_kv,
            hidden=self.d_model,
            inter_size=self.d_ff,
            num_layer=self.num_layers,
            decoder_num_layer=self.num_decoder_layers,
            position="relative" if self.is_relative else "absolute",
            num_buckets_or_max_pos_seq_len=self.positions,
            max_distance=self.relative_attention_max_distance,
            norm="layernorm" if bias else "rmsnorm",
            layernorm_eps=self.layer_norm_epsilon,
            bias=bias,
            scale_attention=bias,
            scale_logits=self.tie_word_embeddings and not bias,
            activation=activation,
            gated=self.use_gated_activation,
            untied_head=self.has_lm_head,
        )

    def ft_limits(self) -> list[str]:
        """Return a reason if the distance of relative positions is not FT's."""
        distance = self.relative_attention_max_distance
        if self.is_relative and distance != FT_MAX_DISTANCE:
            return [
                f"relative_attention_max_distance = {distance}, but FasterTransformer always uses "
                f"{FT_MAX_DISTANCE}"
            ]
        return []


# Keys that both stacks share: they have one embedding and, in FT, layers of the same shape.
_SHARED_KEYS = (
    *_SHARED_FIELDS[1:8], "relative_attention_num_buckets_or_max_pos_seq_len", "adapter_inter_size",
)  # fmt: skip
_TOKEN_KEYS = ("decoder_start_token_id", "eos_token_id")
# Key of both sides -> key of [decoder] with its value.
_COPIED_KEYS = {key: key for key in _TOKEN_KEYS} | {
    "pad_token_id": "pad_id",
    "num_decoder_layers": "num_layers",
}
_DECODER_KEYS = ("num_layers", "decoder_start_token_id", "eos_token_id", "weight_data_type")


ENCODER = "encoder.block.{encoder_layer}."
DECODER = "decoder.block.{decoder_layer}."
ENCODER_SELF = ENCODER + "layer.0.SelfAttention"
DECODER_SELF = DECODER + "layer.0.SelfAttention"
CROSS = DECODER + "layer.1.EncDecAttention"
RELATIVE_BIAS = "{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"

LAYOUT = layout_table("t5")

T5 = ModelFamily(
    name="t5",
    model_type="T5",
    config=T5Config,
    layout=LAYOUT,
    divisible=("num_heads", "d_ff", "adapter_inter_size"),
    # A transposed embedding that huggingface_t5_ckpt_convert.py writes; no loader reads it.
    unread=("shared.weight.bin",),
    owns=lambda sections: bool(sections.get("decoder")),
)

T5_ENCODER = dataclasses.replace(
    T5,
    name="t5_encoder",
    model_type="T5-Encoder",
    owns=lambda sections: not sections.get("decoder"),
)


def t5_warnings(_: Any, config: T5Config) -> list[str]:
    """Return warnings about a model that can be converted, with remedies."""
    warnings = []
    if config.weight_data_type == "fp16":
        warnings.append(
            "T5 and flan-T5 were trained in bf16: in fp16 their activations are known to overflow "
            "(answers of NaN or nonsense); convert with weight_data_type bf16 or fp32 and serve "
            "with data_type bf16 or fp32"
        )
    warnings += [f"{limit}: serve with the pytorch engine" for limit in config.ft_limits()]
    if config.layer_norm_epsilon != FT_NORM_EPS:
        warnings.append(
            f"layer_norm_epsilon = {config.layer_norm_epsilon}: NVIDIA's FasterTransformer always "
            f"uses {FT_NORM_EPS}; the pytorch engine uses the model's"
        )
    return warnings
