"""Linear adapters and IA3 archives for a T5, and sources with factors multiplied in.

Archives: NeMo 1.x, nlp/models/language_modeling/megatron_t5_adapter_model.py.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from export_scripts.checkpoints.base import CheckpointReader
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.families.mapping.sources import (
    Adjusted,
    Compute,
    Copy,
    Sources,
    transposed,
)
from export_scripts.families.mapping.tensors import Tensor, constant, float32, stacked
from export_scripts.families.t5.layout import DECODER, DECODER_SELF, ENCODER
from foundations.files.json_content import Table

# Side -> prefix of a layer's adapters, as `added_tensors` names them.
_ADAPTERS = {
    side: f"enc_dec_model.enc_dec_model.{side}.model.layers.{{{side}_layer}}:"
    for side in ("encoder", "decoder")
}


def _scaler(task: int, side: str, kind: str) -> str:
    """Return the key of a scaler; `kind` is key, value, inter_key, inter_value or mlp."""
    return f"ia3.{task}:{_ADAPTERS[side]}{kind}_infused_adapter.scalers"


def tuning_kind(archive: CheckpointReader) -> Table:
    """Return the adapter_tuning section of an archive's configuration, or an empty table."""
    section = archive.config.get("adapter_tuning")
    return section if isinstance(section, Mapping) else {}


def tuning_reasons(facts: Facts) -> list[str]:
    """Return every reason why IA3 and adapter archives cannot be added."""
    reasons = [
        f"{archive.path}: adapter_tuning.type = {kind!r} is not an IA3 archive; expected ia3"
        for archive in facts.ia3
        if (kind := tuning_kind(archive).get("type")) not in (None, "ia3")
    ]
    if facts.ia3_in_place and len(facts.ia3) != 1:
        reasons.append(
            f"{len(facts.ia3)} IA3 archives cannot be multiplied into one set of weights; name one"
        )
    wanted = {"type": "linear_adapter", "norm_position": "pre", "norm_type": "mixedfusedlayernorm"}
    if len(facts.adapters) > 1:
        reasons.append(f"{len(facts.adapters)} adapter archives; FT holds one")
    for archive in facts.adapters:
        section = tuning_kind(archive)
        reasons += [
            f"{archive.path}: adapter_tuning.{key} = {section.get(key)!r}; FT has only {value}"
            for key, value in wanted.items()
            if section.get(key) != value
        ]
        if not isinstance(section.get("adapter_dim"), int):
            reasons.append(f"{archive.path}: adapter_tuning.adapter_dim is missing")
    return reasons + [
        f"{archive.path}: {key} = {theirs}, but the model was trained with {mine}"
        for archive in (*facts.ia3, *facts.adapters)
        for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        for mine, theirs in [(facts.config.get(key) or 1, archive.config.get(key) or 1)]
        if mine != theirs
    ]


# Side -> prefix of its layers in the layout.
BLOCKS = {"encoder": ENCODER, "decoder": DECODER}
_PLACES = {"1": "after_attention_adapter", "2": "after_ffn_adapter"}


def adapter_sources(facts: Facts) -> Sources:
    """Return the sources of both stacks' adapters; empty without an archive."""
    sources: Sources = {}
    for side, number in itertools.product(BLOCKS, _PLACES if facts.adapters else ()):
        stem = f"adapter.0:{_ADAPTERS[side]}adapter_{number}.module."
        name = f"{BLOCKS[side]}{_PLACES[number]}."
        sources |= {
            f"{name}layer_norm.weight": Copy(f"{stem}0.weight"),
            f"{name}layer_norm.bias": Copy(f"{stem}0.bias"),
            f"{name}DenseSiluDense.wi.weight": transposed(f"{stem}1.weight", cut=0),
            f"{name}DenseSiluDense.wo.weight": transposed(f"{stem}3.weight", cut=1),
        }
    return sources


# Side -> name in the layout of what IA3 scales, without the layer's prefix -> kind of scaler.
_SCALED = {
    "encoder": {
        "layer.0.SelfAttention.k": "key",
        "layer.0.SelfAttention.v": "value",
        "layer.1.DenseReluDense": "mlp",
    },
    "decoder": {
        "layer.0.SelfAttention.k": "key",
        "layer.0.SelfAttention.v": "value",
        "layer.1.EncDecAttention.k": "inter_key",
        "layer.1.EncDecAttention.v": "inter_value",
        "layer.2.DenseReluDense": "mlp",
    },
}


def ia3_sources(facts: Facts) -> Sources:
    """Return the sources of both stacks' scalers, with a row for each task."""
    return {
        f"{BLOCKS[side]}{name}.ia3.weight": Compute(lambda _, *rows: stacked(rows, 0), keys)
        for side, names in _SCALED.items()
        for name, kind in names.items()
        for keys in [tuple(_scaler(task, side, kind) for task in range(len(facts.ia3)))]
    }


def ia3_in_place(table: Sources) -> None:
    """Multiply the only task's scalers into the weights that they scale, in a table of sources.

    Keys and values are scaled after their bias, so that is scaled, too; the MLP's scaler applies to
    the rows of its second matrix.
    """
    for side, names in _SCALED.items():
        for name, kind in names.items():
            stem, key = BLOCKS[side] + name, _scaler(0, side, kind)
            if kind == "mlp":
                # Factors are (d_ff, 1).
                scale(table, f"{stem}.wo.weight", lambda _, each: float32(each)[:, None], key)
            else:
                scale(table, f"{stem}.weight", _heads, key)
                scale(table, f"{stem}.bias", _heads, key)
    pair = [_scaler(0, "decoder", kind) for kind in ("key", "value")]
    for kind in ("weight", "bias"):
        scale(table, f"{DECODER_SELF}.qkv.{kind}", _fused, *pair)


def scale(table: Sources, name: str, factor: Callable[..., Any], *keys: str) -> None:
    """Multiply `factor(config, *tensors)` of the keys' tensors into a source that reads tensors."""
    if name in table and table[name].reads:
        table[name] = Adjusted(
            table[name], lambda part, config, *found: part * factor(config, *found), keys
        )


def _heads(config: Any, scaler: Tensor) -> Tensor:
    return float32(scaler).reshape(config.num_heads, config.d_kv)


def _fused(config: Any, key: Tensor, value: Tensor) -> Tensor:
    """Return factors of the fused (..., 3, heads, size) projection; those of queries are 1."""
    queries = constant([1.0] * config.inner, like=key)
    rows = [queries, float32(key), float32(value)]
    return stacked(rows, 0).reshape(3, config.num_heads, config.d_kv)
