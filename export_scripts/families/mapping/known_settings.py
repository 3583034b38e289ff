"""Known settings of other libraries: computed with, without effect, or not expressible.

The tables next to this module have a line for each name: its use, and values (harmless ones of a
setting that is not expressible, with the library's default first; the default of any other). One
line can stand for all names with a prefix (`sglang_*`). A setting that no table names is refused:
it may change what is computed, and the tensors would not show it. Names and defaults are those of
the libraries (tests/library_settings.py adds those of a new release); published_settings.tsv has
further names in publishers' files, which transformers ignores.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_scripts.families.mapping.source_mapping import Facts
from foundations.errors import Reasons
from foundations.files.json_content import Table, dotted
from foundations.tables import read_cells

_FOLDER = Path(__file__).parent
# Values that mean "not set" in all of the libraries.
_EMPTY: tuple[Any, ...] = (None, "", [], (), {})
# Tables of settings. Those of rotary positions are known as rope_parameters.*: transformers 4.57
# and 5.24, modeling_rope_utils.py. `finetuned`, in the first folders with YaRN, states the weights'
# origin.
_TABLES = ("rope_scaling", "rope_parameters", "attn_config")


# The newest release of transformers whose settings the table has.
RELEASE = (5, 24)


@dataclass(frozen=True)
class KnownSetting:
    """A setting of a library.

    `use` is one of:
        read: computed with, or shown by the tensors
        none: without effect on what is computed
        off: not expressible
        dense: computed with in decoders with rotary positions, not expressible elsewhere
        t5: computed with in T5, not expressible elsewhere
        experts: computed with in mixtures, without effect elsewhere
        mixture: computed with in mixtures, not expressible elsewhere
        experts-off: not expressible in mixtures, without effect elsewhere
    """

    use: str
    values: tuple[Any, ...]
    reason: str = ""  # what a setting that is not expressible changes


KnownSettings = Mapping[str, KnownSetting]  # by name


def table_of_settings(path: Path) -> Iterator[tuple[list[str], KnownSetting]]:
    """Yield (keys, setting) of each line of a table."""
    for *keys, values, use in read_cells(path):
        use, _, reason = use.partition(": ")
        yield keys, KnownSetting(use, tuple(json.loads(values)), reason)


@functools.cache
def library_table(library: str) -> KnownSettings:
    """Return the settings of GPT-NeoX ("eleuther") or of all Megatron libraries, by name."""
    lines = table_of_settings(_FOLDER / f"{library}_settings.tsv")
    return {name: known for (name,), known in lines}


@functools.cache
def huggingface_table(source: str = "huggingface") -> Mapping[str, KnownSettings]:
    """Return model type of transformers -> name -> setting; type * has those of all types.

    The source "published" has publishers' further settings.
    """
    found: dict[str, dict[str, KnownSetting]] = {}
    for (kind, name), known in table_of_settings(_FOLDER / f"{source}_settings.tsv"):
        found.setdefault(kind, {})[name] = known
    return found


@functools.cache
def _other_types() -> KnownSettings:
    """Return the settings of all model types of transformers, as without effect."""
    names = itertools.chain.from_iterable(huggingface_table().values())
    return dict.fromkeys(names, KnownSetting("none", ()))


def huggingface_obstacles(facts: Facts) -> Reasons:
    """Return name -> reason for each setting of a config.json that may change the model.

    A setting that only other model types have is ignored, as transformers ignores it; if the file
    is from a release newer than the table, it may be unknown and is refused.
    """
    table, kind = huggingface_table(), facts.config["model_type"]
    known = {**table["*"], **table[kind], **huggingface_table("published").get(kind, {})}
    tables = {name: facts.config.get(name) for name in _TABLES}
    inner = {
        name: value
        for name, value in dotted(tables).items()
        if (name.startswith("rope_") and f"rope_parameters.{name.rpartition('.')[2]}" not in known)
        or (name.startswith("attn_config.") and name.split(".")[1] not in table["*"])
    }
    version = re.findall(r"\d+", str(facts.config.get("transformers_version")))[:2]
    others = {} if tuple(map(int, version)) > RELEASE else _other_types()
    return {
        **obstacles(facts.config, {**others, **known}, {"read", "none"}),
        **obstacles(inner, known, {"read", "none"}),
    }


def eleuther_obstacles(facts: Facts) -> Reasons:
    """Return name -> reason for each setting of GPT-NeoX that FT's GPT-NeoX cannot express."""
    return obstacles(facts.config, library_table("eleuther"), {"read", "none"})


def megatron_obstacles(source: Table, layout: str = "", experts: str = "experts-off") -> Reasons:
    """Return name -> reason for each setting with which a model computes what a layout cannot.

    `layout` is a further accepted use: "dense", "t5" or "". So is `experts`: "experts-off" for a
    model without experts, "mixture" for a mixture, "" for a hybrid.
    """
    free = {"read", "none", layout, "experts", experts}
    return obstacles(source, library_table("megatron"), free)


def obstacles(source: Table, table: KnownSettings, free: set[str]) -> Reasons:
    """Return name -> reason for each setting that is unknown, or whose use is not in `free`."""
    found = {}
    for name, value in source.items():
        if value in _EMPTY:
            continue
        known = table.get(name) or table.get(f"{name.partition('_')[0]}_*")
        if known is None:
            found[name] = f"{name} = {value!r:.100} is not known, and may change what is computed"
        elif known.use not in free and value not in known.values:
            usual = " or ".join(map(repr, known.values))
            found[name] = (
                f"{name} = {value!r:.100}: {known.reason}, which the layout cannot hold; expected "
                f"{usual}"
            )
    return found
