"""Hugging Face BERT as an origin of the BERT layout.

Names: transformers, models/bert/modeling_bert.py. Embeddings, pooler and heads stay outside.
"""

from __future__ import annotations

from collections.abc import Mapping

from export_scripts.families.bert import BERT, LAYER, BertConfig
from export_scripts.families.origin import Facts, Origin
from export_scripts.families.settings import huggingface_settings, model_name
from export_scripts.families.sources import Copy, Source, Transpose

_PREFIX = "bert."
_LAYER = _PREFIX + "encoder.layer.{layer}."
_LINEARS = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
_NORMS = ("attention.output.LayerNorm", "output.LayerNorm")

# Everything around the layers, and the heads of tasks.
_IGNORED = (
    "*embeddings.*",
    "*pooler.*",
    "cls.*",
    "classifier.*",
    "qa_outputs.*",
)


def _is_bert(facts: Facts) -> bool:
    return facts.config.get("model_type") == "bert"


def _config(facts: Facts) -> BertConfig:
    source = facts.config
    settings = huggingface_settings(source)
    settings.expect("is_decoder", False, why="FT's BERT attends both ways")
    settings.expect("position_embedding_type", "absolute", why="FT's BERT has no position bias")
    hidden = settings.integer("hidden_size")
    heads = settings.integer("num_attention_heads")
    activation, exact_gelu = settings.activation("hidden_act", default="gelu")
    config = BertConfig(
        model_name=model_name(source, "bert"),
        weight_data_type=facts.weight_data_type,
        tensor_para_size=facts.tp_size,
        head_num=heads,
        size_per_head=settings.divide(hidden, heads, "hidden_size by num_attention_heads"),
        inter_size=settings.integer("intermediate_size"),
        num_layer=settings.integer("num_hidden_layers"),
        activation_type=activation.lower(),
        exact_gelu=exact_gelu,
        position_embedding_type="absolute",
        hidden_size=hidden,
        max_position_embeddings=settings.integer("max_position_embeddings", default=512),
        layer_norm_eps=settings.number("layer_norm_eps", default=1e-12),
    )
    settings.finish()
    return config


def _weights(facts: Facts, config: BertConfig) -> Mapping[str, Source]:  # noqa: ARG001
    table: dict[str, Source] = {}
    for name in _LINEARS:
        table[f"{LAYER}{name}.weight"] = Transpose(f"{_LAYER}{name}.weight")
        table[f"{LAYER}{name}.bias"] = Copy(f"{_LAYER}{name}.bias")
    # Files written by the first ports of BERT call the parameters of a norm gamma and beta.
    old = facts.has(f"{_LAYER.format(layer=0)}{_NORMS[0]}.gamma")
    for name in _NORMS:
        table[f"{LAYER}{name}.weight"] = Copy(f"{_LAYER}{name}.{'gamma' if old else 'weight'}")
        table[f"{LAYER}{name}.bias"] = Copy(f"{_LAYER}{name}.{'beta' if old else 'bias'}")
    return table


HUGGINGFACE_BERT = Origin(
    name="huggingface-bert",
    title="Hugging Face BERT (layers; embeddings, pooler and heads run outside)",
    family=BERT,
    format="huggingface",
    matches=_is_bert,
    config=_config,
    weights=_weights,
    ignored=_IGNORED,
    prefix=_PREFIX,
)
