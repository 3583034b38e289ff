"""Decoders in Hugging Face's form, from the table `decoders.yaml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export_scripts.families import gptj, gptneox, hybrid, mixture
from export_scripts.families.dense import operations
from export_scripts.families.dense.huggingface import (
    DenseDecoder,
    Window,
)
from export_scripts.families.dense.layout import DENSE
from export_scripts.families.gpt import huggingface
from export_scripts.families.gpt.layout import GPT
from export_scripts.families.mapping.huggingface import HuggingFaceDecoder, Trait
from export_scripts.families.mapping.names import KNOWN_NAMES
from export_scripts.families.mapping.settings import Settings, half_precision_warnings
from export_scripts.families.mapping.source_mapping import SourceMapping
from foundations.files.json_content import Fields, Table, without_nulls
from foundations.files.yaml_content import read_table

_FT_FAMILIES = (GPT, gptj.GPTJ, gptneox.GPTNEOX)
_FAMILIES = {each.name: each for each in (*_FT_FAMILIES, DENSE, mixture.MIXTURE, hybrid.HYBRID)}
_TRAITS = {
    **operations.TRAITS,
    **mixture.TRAITS,
    "opt": huggingface.OPT,
    "gptj": gptj.SETTINGS,
    "gptneox": gptneox.SETTINGS,
    "nemotron_h": hybrid.SETTINGS,
}
# Functions for `sources`, which return sources of tensors, and for `warnings`.
_FUNCTIONS = {
    "none": lambda *_: [],
    "no sources": lambda *_: {},
    "half_precision": half_precision_warnings,
    "window_left_out": operations.window_left_out,
    "codegen": gptj.codegen_sources,
    "falcon": operations.falcon_sources,
    "gptneox": gptneox.sources,
    "opt": huggingface.opt_sources,
    "stablelm": operations.norms_of_heads("_layernorm.norms.#.weight"),
    "cohere": operations.norms_of_heads("_norm.weight"),
    **hybrid.FUNCTIONS,
    **mixture.FUNCTIONS,
}


def _with_base(name: str, records: Mapping[str, Table]) -> Fields:
    """Return a record merged into its base; a null removes an entry of a table."""
    own = dict(records[name])
    base = _with_base(own.pop("base"), records) if "base" in own else {}
    for key, value in own.items():
        if isinstance(value, dict):
            own[key] = without_nulls({**base.get(key, {}), **value})
    return {**base, **own}


def _flag(name: str, table: Mapping[Any, Any]) -> Trait:
    """Return the trait of a boolean setting; the table has fields for true, false, or both."""
    fields: dict[bool, Fields] = {value: table.get(value, {}) for value in (True, False)}
    shown = bool(fields[True])  # the value whose fields identify it

    def read(settings: Settings, _: Fields) -> Table:
        return fields[settings.flag(name, default=table.get("default", False))]

    def written(config: Any) -> Table:
        has_them = all(getattr(config, key) == value for key, value in fields[shown].items())
        return {name: has_them is shown}

    return Trait(read, written)


def _decoder(
    model_type: str, record: Fields, lists: Mapping[str, str], usual: Table
) -> HuggingFaceDecoder:
    fields = _as_tuples(record)
    fields["family"] = family = _FAMILIES[fields.get("family", DENSE.name)]
    names = fields.get("names", {})
    if family not in _FT_FAMILIES and "model.wpe" not in names:
        names = {**usual, **names}
    fields["names"] = _as_tuples(names)
    fields["tensors"] = _as_tuples(fields.get("tensors", {}))
    words = fields.get("keys", "*llama").split()
    fields["keys"] = " ".join(lists.get(word, word) for word in words).split()
    for name in {"sources", "warnings"} & fields.keys():
        fields[name] = _FUNCTIONS[fields[name]]
    if (window := fields.get("window")) is not None:
        rule = window.get("slides")
        slides = operations.window_rule(*rule) if rule else None
        fields["window"] = Window(**{**window, "slides": slides})
    flags = (_flag(*each) for each in fields.pop("flags", {}).items())
    fields["traits"] = (*flags, *(_TRAITS[name] for name in fields.get("traits", ())))
    kind = HuggingFaceDecoder if family in _FT_FAMILIES else DenseDecoder
    return kind(model_type=model_type, **fields)


def _as_tuples(table: Table) -> Fields:
    return {key: tuple(each) if isinstance(each, list) else each for key, each in table.items()}


def _mappings() -> dict[str, SourceMapping]:
    records = read_table(Path(__file__).with_suffix(".yaml"))
    lists, usual = records.pop(".keys"), KNOWN_NAMES["huggingface"]
    return {
        name: _decoder(name, _with_base(name, records), lists, usual).mapping()
        for name in records
        if not name.startswith(".")
    }


# model_type -> mapping, in the order of the table.
DECODERS = _mappings()
