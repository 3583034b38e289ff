"""Values that have no effect without other values, by the table `effects.yaml`."""

import operator
import re
from collections.abc import Iterator
from itertools import groupby, product
from pathlib import Path
from typing import Any

from foundations.files.yaml_content import read_table
from foundations.values import MISSING, Key, shown
from launcher_scripts.configuration.schema import KEYS, Config

_TABLE = read_table(Path(__file__).with_name("effects.yaml"))


def problems_of_effects(config: Config) -> Iterator[str]:
    """Yield a problem for each value that has no effect although one was clearly intended."""
    for key, needs in _without_effect(config, "refused"):
        remedy = "change" if key == "stages" else "leave out"
        yield f"{key}={shown(config.at(key))} needs {needs}; set that, or {remedy} {key}."


def notes_of_effects(config: Config) -> Iterator[str]:
    """Yield notes on values that this cluster, or this project, does not use."""
    for needs, rows in groupby(_without_effect(config, "noted"), operator.itemgetter(1)):
        why = f"it needs {needs}" if needs else "accepted for compatibility"
        yield f"without effect: {', '.join(key for key, _ in rows)} ({why})"


def _without_effect(config: Config, table: str) -> Iterator[tuple[str, str | None]]:
    """Yield each given key of a table whose need is not met, with that need in words."""
    for patterns, needs, *when in _TABLE[table]:
        if (needs and _holds(config, needs)) or not all(_holds(config, each) for each in when):
            continue
        for pattern, key in product(patterns, KEYS.values()):
            if _is_given(config, key, *pattern.partition("=")):
                yield key.name, needs and _in_words(needs)


def _in_words(needs: str) -> str:
    """Return needs without the notation of patterns: `a|b|c` becomes "a, b or c"."""
    words = []
    for word in re.split("( and | or )", needs):
        key, _, values = word.partition("=")
        words.append(f"{values} in {key}" if values and KEYS[key].is_list else word)
    text = re.sub(r"\.[*+]", "...", "".join(words))
    if "|" in text:
        text = text.replace(" and ", ", and ").replace(" or ", ", or ")
    return re.sub(r"\|(?=[^|,]*(,|$))", " or ", text).replace("|", ", ")


def _is_given(config: Config, key: Key, name: str, equals: str, values: str) -> bool:
    """Return whether a key is `name` or in that section, and was given with one of `values`."""
    if not f"{key.name}.".startswith(f"{name}."):
        return False
    if key.default is MISSING and key.name != name:
        return False  # the shipped files always set it
    value = config.at(key.name)
    return value not in (key.default, None, [None]) and (not equals or _matches(value, values))


def _holds(config: Config, needs: str) -> bool:
    return any(
        all(_term_holds(config, *term.partition("=")) for term in each.split(" and "))
        for each in needs.split(" or ")
    )


def _term_holds(config: Config, key: str, equals: str, values: str) -> bool:
    return _matches(config.at(key), values) if equals else config.at(key) not in (None, "")


def _matches(value: Any, values: str) -> bool:
    entries = value if isinstance(value, list) else [value]
    return any(re.fullmatch(values, shown(each)) for each in entries)
