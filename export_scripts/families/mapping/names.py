"""The tensors of a decoder in a source: its modules, by those of the layout."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from export_scripts.families.layout.decoder import LAYER
from export_scripts.families.layout.spec import Layout
from export_scripts.families.mapping.source_mapping import ENTRY, Facts
from export_scripts.families.mapping.sources import (
    Adjusted,
    Constant,
    Copy,
    Sources,
    StackQKV,
    attention_heads,
    half,
    key_scales,
    split_qkv,
    transposed,
)
from foundations.files.json_content import Fields
from foundations.files.yaml_content import read_own_table

# Modules of the layout and of a source; of a fused projection, those of its three parts.
Names = Mapping[str, str | tuple[str, str, str]]

QUERY_KEY_VALUE = ("attention.query", "attention.key", "attention.value")
# Modules whose rows are the vocabulary, which training ranks share; with others that are stored
# as sources have them.
_VOCABULARY = ("model.wte", "model.lm_head")
_AS_STORED = (*_VOCABULARY, "model.wpe", LAYER + "mlp.router", LAYER + "mlp.shared.gate")


@functools.cache
def known_names() -> Mapping[str, Any]:
    """Return the modules of a layout and of a source, by the source's name in the table of them."""
    path = Path(__file__).with_name("module_names.yaml")
    return cast(Mapping[str, Any], read_own_table(path))


def whole_names(layer: str, names: Names, ours: str = LAYER) -> Fields:
    """Return names of modules as complete patterns, without empty ones.

    Those of the layout that do not begin with "model." are in a layer, which is `ours` in the
    layout, and which the source calls so.
    """
    outside: Fields = {name: theirs for name, theirs in names.items() if name.startswith("model.")}
    return outside | {
        ours + name: layer + theirs
        if isinstance(theirs, str)
        else tuple(layer + part for part in theirs)
        for name, theirs in names.items()
        if theirs and name not in outside
    }


def named_sources(
    names: Names,
    layout: Layout,
    *,
    rows: str = "own",
    order: str = "nkd",
    in_out: bool = False,
    halves_per_rank: bool = False,
) -> Sources:
    """Return the source of each tensor of a layout that has a name.

    Training ranks, where a source has several, cut each as ranks of the layout do, and embedding
    and head by rows.

    Args:
        names: Modules of the layout and of the source, as complete patterns. Two halves of an MLP
            of one name are the halves of one tensor; a name that ends in "_" is a part of the
            tensor's own, and one with an `ENTRY` that of a tensor which holds several.
        layout: The layout.
        rows: How the rows of separate queries, keys and values are nested, as `attention_heads`
            calls it.
        order: How those of a projection that the layout fuses too are, as `split_qkv` calls it.
        in_out: Whether matrices are (in, out), as in the layout; queries, keys and values are
            then three blocks of columns.
        halves_per_rank: Whether each training rank has a part of both halves of an MLP.
    """
    halves = {
        module.removesuffix("_2") + end: which
        for module, theirs in names.items()
        if module.endswith("dense_h_to_4h_2") and names.get(module.removesuffix("_2")) == theirs
        for which, end in enumerate(("", "_2"))
    }
    out: Sources = {}
    for spec in layout:
        module, _, kind = spec.name.rpartition(".")
        if spec.name in names:
            module, kind = spec.name, "weight"
        if module not in names or kind not in ("weight", "bias"):
            continue
        theirs, bare = names[module], module.removeprefix(LAYER)
        if not isinstance(theirs, str):
            q, k, v = (f"{part}.{kind}" for part in theirs)
            out[spec.name] = StackQKV((q, k, v))
            continue
        name, entry, number = theirs.partition(ENTRY)
        key = f"{name}{'' if name.endswith('_') else '.'}{kind}{entry}{number}"
        if bare == "attention.query_key_value":
            out[spec.name] = Copy(key, blocks=3) if in_out else split_qkv(key, order)
        elif bare in QUERY_KEY_VALUE:
            cut = None if rows == "blocks" else 0
            out[spec.name] = attention_heads(key, QUERY_KEY_VALUE.index(bare), rows, cut)
        elif module in halves:
            out[spec.name] = half(key, halves[module], of_each=halves_per_rank)
        elif module in _AS_STORED:
            out[spec.name] = Copy(key, cut=0 if module in _VOCABULARY else None)
        elif bare == "attention.key_norm":
            out[spec.name] = key_scales(key, spec.split)
        elif len(spec.shape) == 2 and not in_out:
            out[spec.name] = transposed(key, cut=None if spec.split is None else 1 - spec.split)
        else:
            out[spec.name] = Copy(key, cut=spec.split)
    return out


def completed(
    table: Sources,
    layout: Layout,
    facts: Facts,
    *,
    lacks: Callable[[str], bool],
    is_one_plus: bool,
) -> Sources:
    """Return a table with zeros for absent biases, and 1 added to scales of norms.

    `lacks` says whether the model has no bias of a name, `is_one_plus` whether scales are stored as
    their distance from 1.
    """
    shapes = {spec.name: spec.shape for spec in layout}
    first = {"layer": 0, "encoder_layer": 0, "decoder_layer": 0}
    out = dict(table)
    for name, source in table.items():
        is_absent = name.endswith(".bias") and lacks(name)
        if is_absent and not facts.has(source.reads[0][0].format(**first)):
            out[name] = Constant(shapes[name])
        elif is_one_plus and name.endswith("norm.weight"):
            out[name] = Adjusted(source, lambda part, _: part + 1)
    return out
