"""The GPT-NeoX layout: rotary positions that rotate halves, parallel or sequential residual.

Layout: FasterTransformer, models/gptneox/GptNeoXWeight.cc and GptNeoXDecoderLayerWeight.cc
(5.3 line). In EleutherAI's layer files each training rank has its own norms and output biases: the
norms are averaged, the biases are summed over all ranks. Compare examples/pytorch/gptneox/utils/
eleutherai_gpt_neox_convert.py, which sums over only some of the ranks.
"""

# Shapes: S training ranks, h hidden
import functools
import operator
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from export_scripts.families.layout.architecture import DecoderArchitecture, Rotary
from export_scripts.families.layout.config import ini_field
from export_scripts.families.layout.decoder import LAYER, DecoderConfig
from export_scripts.families.layout.spec import ModelFamily, layout_table
from export_scripts.families.mapping.huggingface import Trait, activation_name
from export_scripts.families.mapping.known_settings import eleuther_obstacles
from export_scripts.families.mapping.names import KNOWN_NAMES, named_sources, whole_names
from export_scripts.families.mapping.rotary import FT_BASE, rotary_fields, rotary_fraction
from export_scripts.families.mapping.settings import (
    HUGGINGFACE_ACTIVATIONS,
    Settings,
    half_precision_warnings,
)
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import (
    Adjusted,
    Compute,
    Constant,
    Copy,
    Sources,
    TensorSource,
)
from export_scripts.families.mapping.tensors import float32, rounded
from foundations.files.json_content import Fields, Table


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(DecoderConfig):
    """config.ini [gptneox]; absent keys have the loader's defaults."""

    SECTION: ClassVar[str] = "gptneox"

    rotary_embedding: int  # dimensions of each head that are rotated
    # The loader reads it as an integer: it would take the word True for the default.
    use_gptj_residual: bool = ini_field(True, as_digit=True)
    # Not FT keys, as NVIDIA's runtime always uses 1e-5 and tanh gelu: the model's values.
    layernorm_eps: float = 1e-5
    exact_gelu: bool = False

    def architecture(self) -> DecoderArchitecture:
        """Return the decoder."""
        return self.build_architecture(
            DecoderArchitecture,
            kv_head_num=self.head_num,
            position="rotary_half",
            rotary=Rotary(dims=self.rotary_embedding),
            residual="parallel" if self.use_gptj_residual else "sequential",
            fused_bias_sum=self.use_gptj_residual,
        )


LAYOUT = layout_table("gptneox")
# The sum of both output biases, divided by the number of ranks: each adds it before the all-reduce.
_SUM = LAYER + "mlp.attention.bias.sum"
# The terms of the sum, also divided, as NVIDIA's converter writes them.
_SHARES = (LAYER + "attention.dense.bias", LAYER + "mlp.dense_4h_to_h.bias")


def _whole_biases(stored: GPTNeoXConfig, names: Collection[str]) -> Sources:
    """Return the sources of the output biases, which a folder divides by its ranks.

    If the folder has only their sum, it becomes the MLP's bias, and attention's is zero.
    """
    if not stored.use_gptj_residual:
        return {}
    ranks = stored.tensor_para_size

    def whole(key: str) -> TensorSource:
        return Copy(key) if ranks == 1 else Adjusted(Copy(key), lambda part, _: part * ranks)

    if all(name.format(layer=0) in names for name in _SHARES):
        return {name: whole(name) for name in _SHARES}
    attention, mlp = _SHARES
    return {attention: Constant(("hidden",)), mlp: whole(_SUM)}


GPTNEOX = ModelFamily(
    name="gptneox",
    model_type="GPT-NeoX",
    config=GPTNeoXConfig,
    layout=LAYOUT,
    rank_dependent=_whole_biases,
)


def _summed(config: GPTNeoXConfig, joined: Any) -> Any:
    """Return the sum (h,) over training ranks of their vectors, which are joined (S * h,)."""
    ranks = float32(joined).reshape(-1, config.hidden)  # (S, h)
    return functools.reduce(operator.add, (ranks[rank] for rank in range(ranks.shape[0])))


def _output_bias(config: GPTNeoXConfig, *joined: Any) -> Any:
    """Return an output bias; with a parallel residual, the share that each inference rank adds.

    Several biases are summed after each is divided and rounded to the type on disk, as NVIDIA's
    converter does.
    """
    wholes = [_summed(config, each) for each in joined]
    if not config.use_gptj_residual:
        (whole,) = wholes
        return whole
    kind, ranks = config.weight_data_type, config.tensor_para_size
    shares = [rounded(rounded(whole, kind) / ranks, kind) for whole in wholes]
    return functools.reduce(lambda total, share: rounded(total + share, kind), shares)


_L = "gpt_neox.layers.{layer}."


def sources(facts: Facts, config: GPTNeoXConfig, _: Sources) -> Sources:
    """Return the sources of output biases: whole, or as each rank's share."""
    attention, mlp = (f"{_L}{name}.bias" for name in ("attention.dense", "mlp.dense_4h_to_h"))
    has_bias = facts.config.get("attention_bias", True)
    table: Sources = {_SUM: Compute(_output_bias, (attention, mlp) if has_bias else (mlp,))}
    if config.use_gptj_residual and config.tensor_para_size > 1:
        table |= {
            name: Compute(_output_bias, (key,))
            for name, key in zip(_SHARES, (attention, mlp), strict=True)
        }
    if not has_bias:
        table |= {
            LAYER + "attention.query_key_value.bias": Constant((3, "hidden")),
            LAYER + "attention.dense.bias": Constant(("hidden",)),
        }
    return table


def _read(settings: Settings, values: Table) -> Fields:
    # The activations that FT's GPT-NeoX computes, and those by erf.
    gelus = {name: each for name, each in HUGGINGFACE_ACTIVATIONS.items() if each[0] == "Gelu"}
    _, exact_gelu = settings.activation("hidden_act", default="gelu", known=gelus)
    rotary = rotary_fields(settings, values["size_per_head"], fraction=0.25)
    base, kind = rotary.get("rotary_base", FT_BASE), rotary.get("rotary_scaling_type")
    if kind is not None or base != FT_BASE:
        settings.note(
            f"rotary positions of kind {kind or 'default'} and base {base:g} "
            f"cannot be represented: FT has only plain ones of base {FT_BASE:g}"
        )
    return {"rotary_embedding": rotary["rotary_embedding"], "exact_gelu": exact_gelu}


SETTINGS = Trait(
    _read,
    lambda config: {
        "hidden_act": activation_name("Gelu", exact_gelu=config.exact_gelu),
        "rotary_pct": rotary_fraction(config.rotary_embedding, config.size_per_head),
        "rotary_emb_base": FT_BASE,
        "attention_bias": True,
    },
)


_WTE = "embedding.word_embeddings.weight"
_HEAD = "final.final_linear.weight"
_FREQUENCIES = "layers.0.attention.rotary_emb.inv_freq"
_E = "layers.{layer}."

# Tokens of GPT-NeoX-20B, which every release so far shares.
_START_ID, _END_ID = 0, 2


def _eleuther_config(facts: Facts) -> GPTNeoXConfig:
    """Return the config of a release: sizes from its tensors, the rest from configs/*.yml."""
    settings = Settings(facts.config, label="configs/*.yml")
    groups, stated_heads = map(settings.source.get, ("num-kv-heads", "num-attention-heads"))
    if groups not in (None, stated_heads):
        settings.note(f"num-kv-heads = {groups!r}: FT has one key/value head per head")
    if others := _sparse_layers(settings.source):
        settings.note(f"attention-config has {', '.join(others)}: FT attends to all positions")
    assumed = not _is_training_config(settings.source)
    hidden = facts.size(_WTE, 1)
    given_heads = facts.given_int("head_num")
    heads = given_heads if given_heads is not None else settings.integer("num-attention-heads")
    size_per_head = settings.divide(hidden, heads, "hidden size by heads")
    ids, keys = facts.special_ids(), facts.keys()
    return settings.build_config(
        GPTNeoXConfig,
        facts,
        model_name="gptneox",
        head_num=heads,
        size_per_head=size_per_head,
        inter_size=facts.rows("layers.0.mlp.dense_h_to_4h.bias"),
        num_layer=sum(key.endswith(".input_layernorm.weight") for key in keys),
        vocab_size=facts.rows(_WTE),
        rotary_embedding=_rotary_dims(facts, settings, size_per_head),
        start_id=facts.token("start_id", ids.bos, _START_ID),
        end_id=facts.token("end_id", ids.eos, _END_ID),
        use_gptj_residual=settings.flag("gpt-j-residual", default=assumed),
        layernorm_eps=settings.number("layernorm-epsilon", default=1e-5),
        # The fused kernel computes the tanh form.
        exact_gelu=not settings.flag("bias-gelu-fusion", default=assumed),
    )


def _is_training_config(config: Table) -> bool:
    """Return whether a configuration is a training run's, in which absent keys have defaults.

    A run must state rotary positions, which are not the default. A file without pos-emb is a
    release's, which omits what GPT-NeoX-20B has. Defaults: EleutherAI/gpt-neox,
    megatron/neox_arguments/neox_args.py.
    """
    return "pos-emb" in config


def _sparse_layers(config: Table) -> list[Any]:
    """Return the kinds of attention other than full causal attention."""
    kinds = config.get("attention-config") or []
    return [kind for kind in re.findall(r"[a-z_]+", str(kinds)) if kind not in _WHOLE_ATTENTION]


# Words of attention-config that mean full attention, or all layers.
_WHOLE_ATTENTION = ("global", "flash", "all")


def _rotary_dims(facts: Facts, settings: Settings, size_per_head: int) -> int:
    """Return the number of rotated dimensions: stated, from stored frequencies, or a fraction."""
    given = facts.given_int("rotary_embedding")
    if given is not None:
        return given
    if facts.has(_FREQUENCIES):
        return 2 * facts.size(_FREQUENCIES, 0)
    if "rotary-pct" not in settings.source and not _is_training_config(settings.source):
        settings.problems.append(
            f"{settings.label} has no rotary-pct and the layers hold no rotary_emb.inv_freq: "
            "state --set rotary_embedding=.."
        )
        return 1
    return int(size_per_head * settings.number("rotary-pct", default=1.0))


_ATTENTION_BIAS = _E + "attention.dense.bias"
_MLP_BIAS = _E + "mlp.dense_4h_to_h.bias"
_ELEUTHER_NAMES = {
    "model.wte": _WTE.removesuffix(".weight"),
    **KNOWN_NAMES["megatron"],
    "model.final_layernorm": "final.norm",
    "model.lm_head": _HEAD.removesuffix(".weight"),
}

_ELEUTHER_WEIGHTS: Sources = {
    **{
        name: Compute(
            lambda config, joined: _summed(config, joined) / (joined.shape[0] // config.hidden),
            (source.reads[0][0],),
        )
        if "layernorm" in name
        else source
        for name, source in named_sources(whole_names(_E, _ELEUTHER_NAMES), LAYOUT).items()
    },
    LAYER + "attention.dense.bias": Compute(_output_bias, (_ATTENTION_BIAS,)),
    LAYER + "mlp.dense_4h_to_h.bias": Compute(_output_bias, (_MLP_BIAS,)),
    _SUM: Compute(_output_bias, (_ATTENTION_BIAS, _MLP_BIAS)),
}


def _eleuther_weights(facts: Facts, _: GPTNeoXConfig) -> Sources:
    """Return each tensor's source; the head of a tied model is its embedding."""
    untied = facts.config.get("no-weight-tying", not _is_training_config(facts.config))
    if facts.has(_HEAD) or untied is not False:
        return _ELEUTHER_WEIGHTS
    return {**_ELEUTHER_WEIGHTS, "model.lm_head.weight": Copy(_WTE, cut=0)}


def _eleuther_warnings(facts: Facts, config: GPTNeoXConfig) -> list[str]:
    assumed = []
    if "gpt-j-residual" not in facts.config and not _is_training_config(facts.config):
        assumed.append(
            "configs/*.yml does not set gpt-j-residual; the parallel residual of GPT-NeoX-20B is "
            "assumed (--set use_gptj_residual=0 for the other)"
        )
    return assumed + half_precision_warnings(facts, config)


GPTNEOX_ELEUTHER = SourceMapping(
    name="eleuther-gptneox",
    title="GPT-NeoX, EleutherAI layer files (layer_*-model_*-model_states.pt)",
    family=GPTNEOX,
    format="eleuther",
    matches=lambda facts: facts.has(_WTE),
    config=_eleuther_config,
    obstacles=eleuther_obstacles,
    weights=_eleuther_weights,
    ignored=("*.rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias"),
    accepts=("prompt",),
    warnings=_eleuther_warnings,
)
