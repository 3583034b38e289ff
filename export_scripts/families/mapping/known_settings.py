"""Settings of other libraries, each known: computed with, without effect, or not expressible.

The tables next to this module list every name, how it is used, and values: of a setting that stands
in the way, those that change nothing (the library's default first), of others their defaults. All
that begin with one word are one line (`sglang_*`). A setting that no table names is refused, as it
may change what is computed without a trace in the tensors. Names and defaults are the libraries'
own (tests/library_settings.py adds those of a new release); published_settings.tsv has what
publishers' own files state more, which transformers passes over.
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
from foundations.files.json_content import Table

_FOLDER = Path(__file__).parent
# Values that state nothing, in any of the libraries.
_EMPTY: tuple[Any, ...] = (None, "", [], (), {})
# Parameters of rotary positions, which the table lists as rope_parameters: transformers 4.57 and
# 5.24, modeling_rope_utils.py. `finetuned`, of the first folders with YaRN, says how the weights
# came about.
_ROTARY_TABLES = ("rope_scaling", "rope_parameters")


# The newest transformers of which the table has the settings.
RELEASE = (5, 24)


@dataclass(frozen=True)
class KnownSetting:
    """One setting of a library.

    `use` is one of:
        read: computed with, or shown by the tensors
        none: without effect on what is computed
        off: not expressible
        dense: computed with in decoders with rotary positions, elsewhere not expressible
        t5: computed with in T5, elsewhere not expressible
        experts: computed with in mixtures, without effect elsewhere
        mixture: computed with in mixtures, elsewhere not expressible
        experts-off: not expressible in mixtures, without effect elsewhere
    """

    use: str
    values: tuple[Any, ...]
    why: str = ""  # what a setting that stands in the way changes


def table_of_settings(path: Path) -> Iterator[tuple[list[str], KnownSetting]]:
    """Yield the keys and the setting of each line of a table."""
    for line in path.read_text(encoding="utf-8").splitlines():
        *keys, values, use = line.split("\t")
        use, _, why = use.partition(": ")
        yield keys, KnownSetting(use, tuple(json.loads(values)), why)


@functools.cache
def library_table(library: str) -> Mapping[str, KnownSetting]:
    """Return the settings of GPT-NeoX (eleuther), or of all that is Megatron's, by name."""
    lines = table_of_settings(_FOLDER / f"{library}_settings.tsv")
    return {name: known for (name,), known in lines}


@functools.cache
def huggingface_table(source: str = "huggingface") -> Mapping[str, Mapping[str, KnownSetting]]:
    """Return the settings of each model type of transformers by name; those of all as type *.

    The source may also be `published`.
    """
    found: dict[str, dict[str, KnownSetting]] = {}
    for (kind, name), known in table_of_settings(_FOLDER / f"{source}_settings.tsv"):
        found.setdefault(kind, {})[name] = known
    return found


@functools.cache
def _of_any_type() -> Mapping[str, KnownSetting]:
    """Return the settings of all model types of transformers, as what other types have."""
    names = itertools.chain.from_iterable(huggingface_table().values())
    return dict.fromkeys(names, KnownSetting("none", ()))


def huggingface_obstacles(facts: Facts) -> dict[str, str]:
    """Return a reason for each setting of a config.json that may make the model another one.

    One that only models of other types have is none of this type: transformers passes over it, if
    the file is of a release whose settings are known.
    """
    table, kind = huggingface_table(), facts.config["model_type"]
    known = {**table["*"], **table[kind], **huggingface_table("published").get(kind, {})}
    rotary = {name: facts.config.get(name) for name in _ROTARY_TABLES}
    unknown = {
        name: value
        for name, value in _dotted(rotary)
        if f"rope_parameters.{name.rpartition('.')[2]}" not in known
    }
    version = re.findall(r"\d+", str(facts.config.get("transformers_version")))[:2]
    others = {} if tuple(map(int, version)) > RELEASE else _of_any_type()
    return {
        **obstacles(facts.config, {**others, **known}, {"read", "none"}),
        **obstacles(unknown, {}, set()),
    }


def _dotted(table: Table, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a table and of the tables in it, with the keys that lead to it."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{path}{key}.")
        elif path:
            yield f"{path}{key}", value


def eleuther_obstacles(facts: Facts) -> dict[str, str]:
    """Return a reason for each setting of GPT-NeoX that FT's GPT-NeoX does not compute with."""
    return obstacles(facts.config, library_table("eleuther"), {"read", "none"})


def megatron_obstacles(
    source: Table, layout: str = "", experts: str = "experts-off"
) -> dict[str, str]:
    """Return a reason for each setting by which a model may compute what its layout does not.

    `layout` is the use of the settings that it alone computes with: dense, t5, or neither;
    `experts` that of those which do no harm: experts-off without experts, mixture in a mixture, and
    none in a hybrid, which computes with neither.
    """
    free = {"read", "none", layout, "experts", experts}
    return obstacles(source, library_table("megatron"), free)


def obstacles(source: Table, table: Mapping[str, KnownSetting], free: set[str]) -> dict[str, str]:
    """Return a reason for each setting that a table does not have, or has not among the `free`."""
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
                f"{name} = {value!r:.100}: {known.why}, which the layout does not hold; expected "
                f"{usual}"
            )
    return found
