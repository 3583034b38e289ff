"""Messages for wrong overrides: the expected value, and the remedy."""

import typing
from collections.abc import Iterator

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from export_scripts.suggest import closest, did_you_mean
from export_scripts.values import Key, shortened
from launcher_scripts.configuration.schema import CLUSTER_ALIASES, GROUPS, KEYS
from launcher_scripts.configuration.settings import CONFIG_DIR
from stages import STAGES

_STAGES = "stages"  # a list that is not empty, of known names
_SECTIONS = {name.rsplit(".", depth)[0] for name in KEYS for depth in range(1, name.count(".") + 1)}


class InvalidValueError(ValueError):
    """The schema refuses a value; the message is a whole sentence."""


def files_of_group(group: str) -> list[str]:
    """Return the shipped files of a group by the names that choose them: `gpt3/sample`."""
    root = CONFIG_DIR / group
    files = (each.relative_to(root).with_suffix("") for each in root.rglob("*.yaml"))
    return sorted(each.as_posix() for each in files)


def check_name(override: str) -> None:
    """Check that an override does not add or remove a key, outside of mappings with free names.

    Raises:
        InvalidValueError: `+` adds a key that the schema lacks, or has already; `~` removes one;
            a group is given several files, or none.
    """
    sign = override[: len(override) - len(override.lstrip("+~"))]
    name, _, value = override.lstrip("+~").partition("=")
    if name in GROUPS and value.lstrip().startswith(("[", "{")):
        raise InvalidValueError(_unknown_choice(name, value))
    if not sign or is_free(name):
        return
    if sign == "++" and name in KEYS:
        return  # added or changed
    if name not in KEYS and name not in GROUPS:
        raise InvalidValueError(_unknown_key(override, name))
    if sign == "~":
        raise InvalidValueError(
            f"{override}: {name} cannot be removed; give it another value, or null where "
            "--help all allows it."
        )
    raise InvalidValueError(
        f"{override}: {name} exists already; leave the {sign} out: {override.removeprefix(sign)}"
    )


def unknown_keys(values: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield the problem of each key in the files that the schema lacks."""
    for each, value in values.items_ex(resolve=False):
        name = prefix + str(each)
        if name in _SECTIONS and isinstance(value, DictConfig):
            yield from unknown_keys(value, f"{name}.")
        elif name not in KEYS:
            yield _unknown_key(f"{name} (in a configuration file)", name)


def diagnose(override: str, error: Exception) -> str:
    """Return the problem of one override, with the expected value and the remedy."""
    if isinstance(error, InvalidValueError):
        return str(error)
    # Those of mappings with free names were given their ++ by `read_arguments`.
    override = override.removeprefix("++")
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return _unreadable(override)
    key = parsed.key_or_group
    if parsed.is_delete():
        return f"{override}: the entry does not exist; null entries are left out anyway."
    if key in GROUPS and not parsed.is_sweep_override():
        return _unknown_choice(key, override.partition("=")[2])
    if key not in KEYS and not is_free(key):
        return _unknown_key(override, key)
    if parsed.is_sweep_override():
        value = override.partition("=")[2]
        is_list = key in KEYS and KEYS[key].is_list
        remedy = f"; a list is written '{key}=[{value}]'" if is_list else ""
        return f"{override} lists alternatives, which needs --multirun{remedy}."
    return _wrong_type(parsed, KEYS.get(key), error)


def _unreadable(override: str) -> str:
    if override in STAGES:
        return f"{override!r} is a stage; write 'stages=[{override}]'."
    if "=" not in override:
        return f"{override!r} is not of the form key=value{likely_key(override)}."
    return (
        f"{override!r} cannot be read as key=value; lists are written 'stages=[convert,export]' "
        "and values with spaces 'key=\"a b\"', in quotes for the shell."
    )


def likely_key(word: str) -> str:
    """Return ` (did you mean key=<value>?)` for a word without a value, or an empty text."""
    key = closest(word.strip("-").replace("-", "_"), KEYS)
    return f" (did you mean {key}=<value>?)" if key else ""


def _unknown_choice(group: str, value: str) -> str:
    known = files_of_group(group)
    aliases = CLUSTER_ALIASES if group == "cluster" else ()
    return (
        f"{group}={value}: unknown configuration{did_you_mean(value, [*known, *aliases])}; "
        f"use one of {', '.join(known)}."
    )


def _unknown_key(override: str, key: str) -> str:
    if not key:
        return f"{override!r} has no key; write key=value, without spaces around the =."
    if key in _SECTIONS:
        inside = sorted(name for name in KEYS if name.startswith(f"{key}."))
        return f"{override}: {key} is a section; set one of its keys: {', '.join(inside)}."
    known = [*KEYS, *GROUPS]
    remedy = "" if did_you_mean(key, known) else "; --help all lists the keys"
    return f"{override}: unknown key {key}{did_you_mean(key, known)}{remedy}."


def _wrong_type(parsed: Override, key: Key | None, error: Exception) -> str:
    word = shortened(str(parsed.input_line))
    if key is None:
        return f"{word}: {objection(error)}"
    if key.is_list and _is_entry(key, parsed.value()):
        return f"{word}: expected a list; write '{key.name}=[{shortened(str(parsed.value()))}]'."
    if key.is_list and parsed.value() is None and key.name != _STAGES:
        return f"{word}: expected a list such as [a,b]; [] is one without entries."
    return f"{word}: expected {key.expected()} ({key.text})."


def _is_entry(key: Key, value: object) -> bool:
    """Return whether a list of a value is what its key expects."""
    if key.name == _STAGES:
        return set(str(value).split(",")) <= set(STAGES)
    (kind,) = typing.get_args(key.type)
    has_kind = type(value) is (str if kind is typing.Any else kind)
    return has_kind and key.problem([value]) is None


def is_free(name: str) -> bool:
    """Return whether a key is inside a mapping with free names."""
    parents = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]
    return any(each in KEYS for each in parents)


def objection(error: BaseException) -> str:
    """Return an error of Hydra, OmegaConf or YAML in one line."""
    if isinstance(error, yaml.YAMLError):
        return " ".join(str(error).split())
    cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
    return first_line(cause)


def first_line(error: BaseException) -> str:
    """Return the first line of OmegaConf's error, with its key."""
    lines = str(error).strip().splitlines()
    name = next((line.split(": ", 1)[1] for line in lines if "full_key" in line), "")
    text = lines[0] if lines else type(error).__name__
    return f"{name}: {text}" if name and name not in text else text
