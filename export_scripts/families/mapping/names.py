"""The sources of a decoder's tensors, from the names of its modules."""

from collections.abc import Callable, Mapping
from pathlib import Path

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
from foundations.files.json_content import Fields, Table
from foundations.files.yaml_content import read_table

# Module of the layout -> module of a source, or three if the layout fuses queries, keys and values.
Names = Mapping[str, str | tuple[str, str, str]]

QUERY_KEY_VALUE = ("attention.query", "attention.key", "attention.value")
# Modules whose rows are the vocabulary, which training ranks cut; and all modules that the layout
# does not transpose.
_VOCABULARY = ("model.wte", "model.lm_head")
_AS_STORED = (*_VOCABULARY, "model.wpe", LAYER + "mlp.router", LAYER + "mlp.shared.gate")


# Name of a source -> its table.
KNOWN_NAMES: Table = read_table(Path(__file__).with_name("module_names.yaml"))


def whole_names(layer: str, names: Names, ours: str = LAYER) -> Fields:
    """Return names of modules as complete patterns, without empty ones.

    Modules of the layout that do not begin with "model." are in a layer: `ours` is its prefix in
    the layout, `layer` in the source.
    """
    outside = {name: theirs for name, theirs in names.items() if name.startswith("model.")}
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
    """Return the source of each tensor of a layout whose module has a name.

    Training ranks, if there are several, cut a tensor like ranks of the layout; embedding and head
    by rows.

    Args:
        names: Module of the layout -> module of the source, as complete patterns. If both halves of
            a gated MLP have the same name, one tensor holds them; a name that ends in "_" is the
            beginning of a parameter's name; one with an `ENTRY` is an entry of a tensor.
        layout: The layout.
        rows: The nesting of the rows of separate queries, keys and values (`attention_heads`).
        order: The nesting of the rows of a fused projection (`split_qkv`).
        in_out: Whether matrices are (in, out), as in the layout; a fused projection is then three
            blocks of columns.
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
            out[spec.name] = half(key, halves[module], per_rank=halves_per_rank)
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
    """Return a table with zeros for missing biases, and 1 added to scales of norms if needed.

    `lacks` says whether the model has no bias of a name, `is_one_plus` whether it stores scales as
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
