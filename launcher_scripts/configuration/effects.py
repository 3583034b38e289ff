"""Values that need others, by the table `effects.yaml`."""

import re
from collections.abc import Iterator
from pathlib import Path

from foundations.files.yaml_content import read_own_table
from foundations.values import MISSING, shown
from launcher_scripts.configuration.schema import KEYS, Config

_TABLE = read_own_table(Path(__file__).with_name("effects.yaml"))


def problems_of_effects(config: Config) -> Iterator[str]:
    """Yield the values that were meant for something else, and what they need."""
    for key, needs in _idle(config, "refused").items():
        yield f"{key}={shown(config.at(key))} needs {needs}; set that, or leave {key} out."


def notes_of_effects(config: Config) -> Iterator[str]:
    """Yield remarks on values that this cluster, or this project, does not use."""
    found = _idle(config, "noted")
    for needs in dict.fromkeys(found.values()):
        keys = ", ".join(key for key, each in found.items() if each == needs)
        why = f"it needs {needs}" if needs else "accepted for compatibility"
        yield f"without effect: {keys} ({why})"


def _idle(config: Config, table: str) -> dict[str, str | None]:
    """Return the keys that are given and have no effect, and the first need that is not met."""
    found: dict[str, str | None] = {}
    for patterns, needs, *when in _TABLE[table]:
        if _holds(config, needs) or not all(_holds(config, each) for each in when):
            continue
        for pattern in patterns:
            name = pattern.partition("=")[0]
            for key in KEYS.values():
                if f"{key.name}.".startswith(f"{name}.") and _is_given(config, key.name, pattern):
                    found.setdefault(key.name, needs)
    return found


def _is_given(config: Config, key: str, pattern: str) -> bool:
    """Return whether a key has a value that a pattern means; files give those of whole sections."""
    value, default = config.at(key), KEYS[key].default
    if key == pattern.partition("=")[0]:
        return value not in (default, [None]) and _has(config, pattern)
    return default is not MISSING and value not in (default, None)


def _holds(config: Config, needs: str | None) -> bool:
    return needs is not None and any(
        all(_has(config, term) for term in each.split(" and ")) for each in needs.split(" or ")
    )


def _has(config: Config, term: str) -> bool:
    name, _, pattern = term.partition("=")
    value = config.at(name)
    entries = value if isinstance(value, list) else [value]
    if not pattern:
        return any(each not in (None, "") for each in entries)
    return any(re.fullmatch(pattern, shown(each)) for each in entries)
