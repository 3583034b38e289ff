"""Overrides as typed: each is parsed, or refused with a remedy."""

from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from foundations.files.yaml_content import read_table
from foundations.suggest import closest, did_you_mean
from foundations.values import shortened
from launcher_scripts.configuration.schema import CLUSTER_ALIASES, GROUPS, KEYS, SECTIONS
from launcher_scripts.configuration.settings import CONFIG_DIR
from stages import STAGES

_REMOVED = read_table(Path(__file__).with_name("removed_keys.yaml"))


@cache
def read_override(word: str) -> Override:
    """Return a parsed override; unlike in Hydra, a text like `nvcr.io#nvidia/x:1` needs no quotes.

    Raises:
        ValueError: it cannot be parsed; the message is a whole sentence.
    """
    parser = OverridesParser.create()
    key, equals, value = word.partition("=")
    if equals and not key:
        raise ValueError(f"{word!r} has no key; write key=value, without spaces around the =.")
    quoted = [f"{key}={hydra_text(value)}"] if equals and not value.startswith(("[", "{")) else []
    for candidate in (word, *quoted):
        with suppress(HydraException):
            return parser.parse_override(candidate)
    if word in STAGES:
        raise ValueError(f"{word!r} is a stage; write 'stages=[{word}]'.")
    if not equals:
        raise ValueError(f"{word!r} is not of the form key=value{likely_key(word)}.")
    raise ValueError(
        f"{word!r} cannot be read as key=value; lists are written 'stages=[convert,export]', "
        "mappings 'key={a:1}', without quotes around a; other values with [, { or spaces "
        "'key=\"[a b]\"', and those with = or : in a list 'key=[\"a=b\"]', in quotes for the shell."
    )


def hydra_text(text: str) -> str:
    """Return a text as Hydra's grammar quotes it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def is_below(word: str, names: Iterable[str]) -> bool:
    """Return whether a key, or an override of it, is in `names` or in a section in `names`."""
    key = word.lstrip("+").partition("=")[0]
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def decided_elsewhere(overrides: Iterable[str], keys: Iterable[str], why: str) -> list[str]:
    """Return a problem for each override of `keys`, whose values the action sets itself."""
    return [
        f"{override}: {why}; leave it out." for override in overrides if is_below(override, keys)
    ]


def chooses_file(name: str) -> bool:
    """Return whether the name is a group of files, or a misspelt one."""
    is_misspelt = "." not in name and name not in KEYS and closest(name, GROUPS) is not None
    return name in GROUPS or is_misspelt


def key_of(override: Override) -> str:
    """Return the key that an override changes: the one it names, or the mapping that it enters."""
    names = override.key_or_group.split(".")
    parents = (".".join(names[:count]) for count in range(1, len(names)))
    return next((parent for parent in parents if parent in KEYS), override.key_or_group)


def check_override(override: Override) -> str | None:
    """Return why an override is refused before its value is checked; None if it is not."""
    name, word = override.key_or_group, str(override.input_line)
    if override.package is not None:
        return f"{word}: @ is not supported; leave @{override.package} out."
    key, _, value = word.partition("=")
    is_entry = key_of(override) != name  # an entry of a mapping
    if not (is_entry or name in KEYS or name in GROUPS):
        return unknown_key(word, name)
    if override.is_sweep_override():
        remedy, meant = "", KEYS.get(name)
        if is_entry or (meant and meant.is_list):
            remedy += f"; a list is written '{key}=[{value}]'"
        if is_entry or (meant and str in meant.kinds):
            remedy += f"; a text with commas is written '{key}=\"{value}\"'"
        return f"{word} lists alternatives, which needs --multirun{remedy}."
    if is_entry:
        return None
    if override.is_delete():
        return (
            f"{word}: {name} cannot be removed; give it another value, or null where --help all "
            "allows it."
        )
    if override.is_add() and not override.is_force_add():
        return f"{word}: {name} exists already; leave the + out: {word.removeprefix('+')}"
    if name in GROUPS and not isinstance(override.value(), str):
        return unknown_choice(name, value)
    return None


def likely_key(word: str) -> str:
    """Return ` (did you mean key=<value>?)` for a word without a value, or an empty text."""
    key = closest(word.strip("-").replace("-", "_"), KEYS)
    return f" (did you mean {key}=<value>?)" if key else ""


def files_of_group(group: str) -> list[str]:
    """Return the names of a group's shipped files, such as `gpt3/sample`."""
    root = CONFIG_DIR / group
    files = (each.relative_to(root).with_suffix("") for each in root.rglob("*.yaml"))
    return sorted(file.as_posix() for file in files)


def unknown_choice(group: str, value: str) -> str:
    """Return the problem of a file that a group does not have."""
    known = files_of_group(group)
    aliases = CLUSTER_ALIASES if group == "cluster" else ()
    hint = did_you_mean(value, [*known, *aliases])
    wrong = f"{group}={shortened(value)}: unknown configuration{hint}"
    return f"{wrong}; use one of {', '.join(known)}."


def unknown_key(word: str, key: str) -> str:
    """Return the problem of a word that names no key."""
    if key in SECTIONS:
        inside = sorted(name for name in KEYS if name.startswith(f"{key}."))
        return f"{word}: {key} is a section; set one of its keys: {', '.join(inside)}."
    for removed, instead in _REMOVED.items():
        if fnmatchcase(key, removed):
            return f"{word}: {key} was removed; {instead}."
    hint = did_you_mean(key, [*KEYS, *GROUPS])
    return f"{word}: unknown key {key}{hint or '; --help all lists the keys'}."


def error_line(error: BaseException) -> str:
    """Return an error of Hydra, OmegaConf or YAML as one line."""
    if isinstance(error, yaml.YAMLError):
        return " ".join(str(error).split())
    cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
    return first_line(cause)


def first_line(error: BaseException) -> str:
    """Return the first line of OmegaConf's error, with the key it concerns."""
    lines = str(error).strip().splitlines()
    name = next((line.split(": ", 1)[1] for line in lines if "full_key" in line), "")
    text = lines[0] if lines else type(error).__name__
    return f"{name}: {text}" if name and name not in text else text
