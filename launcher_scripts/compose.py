"""Compose the configuration with Hydra and say clearly what is wrong with it, all at once."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from launcher_scripts.config import GROUPS, Config, Key, keys
from launcher_scripts.suggest import did_you_mean

CHECKOUT = Path(__file__).resolve().parents[1]
CONFIG_DIR = CHECKOUT / "conf"
CONFIG_NAME = "config"
_KEYS: Mapping[str, Key] = {key.name: key for key in keys()}
_SECTIONS = {
    name.rsplit(".", depth)[0] for name in _KEYS for depth in range(1, name.count(".") + 1)
}


@dataclass(frozen=True)
class Composition:
    """A composed configuration.

    Attributes:
        config: the configuration, or None when too little of it is known.
        resolved: the same as plain data, as it is saved.
        choices: the file chosen for each group.
        problems: everything that is wrong, one sentence each.
    """

    config: Config | None
    resolved: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


class _InvalidError(ValueError):
    """A value that has the right type but is not allowed."""


_OBJECTIONS = (HydraException, OmegaConfBaseException, _InvalidError, yaml.YAMLError)


def files_of_group(group: str) -> list[str]:
    """Return the shipped files of a group, as they are chosen: `gpt3/sample`."""
    root = CONFIG_DIR / group
    files = (each.relative_to(root).with_suffix("") for each in root.rglob("*.yaml"))
    return sorted(each.as_posix() for each in files)


@functools.cache
def register() -> None:
    """Make the schema and the resolvers known to Hydra and OmegaConf."""
    ConfigStore.instance().store(name="schema", node=Config)
    for name, function in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


# multiply, divide_ceil and divide_floor are the names that configurations of the NeMo launcher use.
_RESOLVERS: dict[str, Callable[..., Any]] = {
    "multiply": lambda x, y: x * y,
    "divide_ceil": lambda x, y: int(-(-x // y)),
    "divide_floor": lambda x, y: int(x // y),
    "checkout": lambda: str(CHECKOUT),
}


def compose_config(
    overrides: Sequence[str],
    *,
    config_dir: Path = CONFIG_DIR,
    config_name: str = CONFIG_NAME,
    extra_dir: Path | None = None,
) -> Composition:
    """Return the configuration; overrides that are wrong are named and left out."""
    register()
    root = config_dir / f"{config_name.removesuffix('.yaml')}.yaml"
    if not root.is_file():
        return Composition(None, problems=(f"there is no configuration {root}.",))
    extra = [f"hydra.searchpath=[file://{extra_dir}]"] if extra_dir else []
    composer = _Composer(config_name, extra)
    with _hydra(config_dir):
        config, problems = composer.compose_what_works(overrides)
        if config is None:
            return Composition(None, problems=tuple(problems))
        choices = dict(HydraConfig.get().runtime.choices)
        problems += [_missing_text(key) for key in _KEYS.values() if _is_missing(config, key.name)]
        if any(_is_missing(config, name) for name in _KEYS):
            return Composition(None, choices=choices, problems=tuple(problems))
        try:
            resolved = OmegaConf.to_container(config, resolve=True)
            built = OmegaConf.to_object(config)
        except OmegaConfBaseException as error:
            return Composition(None, choices=choices, problems=(*problems, _first_line(error)))
    assert isinstance(built, Config)
    assert isinstance(resolved, dict)
    plain = {str(key): value for key, value in resolved.items()}
    return Composition(built, plain, choices, tuple(problems))


class _Composer:
    """Composes the same root again and again with other overrides."""

    def __init__(self, config_name: str, always: Sequence[str]) -> None:
        self._name = config_name
        self._always = list(always)

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the typed configuration. Raises what Hydra, OmegaConf or the choices object to."""
        config = compose(
            self._name, overrides=[*self._always, *overrides], return_hydra_config=True
        )
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
        typed = _typed(config, overrides)
        _check_values(typed)
        _make_absolute(typed)
        return typed

    def compose_what_works(self, overrides: Sequence[str]) -> tuple[DictConfig | None, list[str]]:
        """Return the configuration without the overrides that are wrong, and their problems."""
        try:
            return self.compose(overrides), []
        except _OBJECTIONS:
            pass
        try:
            config = self.compose([])
        except _OBJECTIONS as error:
            return None, [f"the configuration files cannot be used: {_told(error)}."]
        good: list[str] = []
        problems: list[str] = []
        # A file is chosen before its keys are set, as Hydra does it.
        for override in sorted(overrides, key=lambda each: not _is_group_choice(each)):
            composed, problem = self._try(good, override)
            if composed is None:
                problems.append(problem)
            else:
                config = composed
                good.append(override)
        return config, problems

    def _try(self, good: Sequence[str], override: str) -> tuple[DictConfig | None, str]:
        try:
            return self.compose([*good, override]), ""
        except _OBJECTIONS as error:
            return None, _diagnose(override, error)


def _typed(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the configuration with its schema: a saved file has none yet.

    Raises:
        _InvalidError: `+` adds a key that the schema does not have.
    """
    if OmegaConf.get_type(config) is Config:
        for override in overrides:
            key = override.partition("=")[0]
            name = key.lstrip("+")
            if key != name and name not in _KEYS and not _is_below_free_form(name):
                raise _InvalidError(_unknown_key(override, name))
        return config
    plain = OmegaConf.to_container(config)
    typed = OmegaConf.merge(OmegaConf.structured(Config), plain)
    assert isinstance(typed, DictConfig)
    return typed


def _diagnose(override: str, error: Exception) -> str:
    """Return what is wrong with one override, what is expected and what to do."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return (
            f"{override!r} cannot be read as key=value; lists are written "
            "'stages=[convert,export]' and values with blanks 'key=\"a b\"', in quotes for the "
            "shell."
        )
    key = parsed.key_or_group
    if isinstance(error, _InvalidError):
        return str(error)
    if key in GROUPS and not parsed.is_sweep_override() and isinstance(parsed.value(), str):
        return _unknown_choice(key, str(parsed.value()))
    if key not in _KEYS and not _is_below_free_form(key):
        return _unknown_key(override, key)
    if parsed.is_sweep_override():
        return (
            f"{override} lists alternatives, which needs --multirun; a list is written "
            f"{key}=[{override.partition('=')[2]}]."
        )
    return _wrong_type(parsed, _KEYS.get(key), error)


def _unknown_choice(group: str, value: str) -> str:
    known = files_of_group(group)
    return (
        f"{group}={value}: there is no such configuration{did_you_mean(value, known)}; "
        f"use one of {', '.join(known)}."
    )


def _unknown_key(override: str, key: str) -> str:
    if key in _SECTIONS:
        inside = sorted(name for name in _KEYS if name.startswith(f"{key}."))
        return f"{override}: {key} is a section; set one of its keys: {', '.join(inside)}."
    known = [*_KEYS, *GROUPS]
    remedy = "" if did_you_mean(key, known) else "; --help lists all keys"
    return f"{override}: there is no key {key}{did_you_mean(key, known)}{remedy}."


def _wrong_type(parsed: Override, key: Key | None, error: Exception) -> str:
    if key is None:
        return f"{parsed.input_line}: {_told(error)}"
    if typing.get_origin(key.type) is list and isinstance(parsed.value(), (str, int, float)):
        return f"{parsed.input_line}: expected a list; write '{key.name}=[{parsed.value()}]'."
    return f"{parsed.input_line}: expected {_kind(key)} ({key.text})."


def _kind(key: Key) -> str:
    """Return the type of a key in words."""
    if key.choices:
        return "one of " + ", ".join(dict.fromkeys(map(_yaml, key.choices)))
    options = [key.type]
    if isinstance(key.type, types.UnionType):
        options = list(typing.get_args(key.type))
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text",
             type(None): "null", Any: "a value"}  # fmt: skip
    words = []
    for each in options:
        origin = typing.get_origin(each)
        if origin is list:
            words.append("a list such as [a,b]")
        elif origin is dict:
            words.append("a mapping such as {a: 1}")
        else:
            words.append(names[each])
    return " or ".join(words)


def _check_values(config: DictConfig) -> None:
    """Refuse values that are not among the choices or too small."""
    for key in _KEYS.values():
        if not key.choices and key.minimum is None:
            continue
        if _is_missing(config, key.name):
            continue
        try:
            value = OmegaConf.select(config, key.name)
        except OmegaConfBaseException:
            continue  # an interpolation of something that is missing, which is told elsewhere
        if key.choices and not any(value == each for each in key.choices):
            known = [_yaml(each) for each in key.choices]
            raise _InvalidError(
                f"{key.name}={_yaml(value)}: {key.text}{did_you_mean(str(value), known)}; "
                f"use one of {', '.join(dict.fromkeys(known))}."
            )
        if key.minimum is not None and value is not None and value < key.minimum:
            raise _InvalidError(
                f"{key.name}={_yaml(value)}: {key.text}; must be at least {key.minimum:g}."
            )


def _make_absolute(config: DictConfig) -> None:
    """Make paths independent of the folder in which the command was typed."""
    for key in _KEYS.values():
        if not key.is_path:
            continue
        parent, leaf = _parent(config, key.name), key.name.rpartition(".")[2]
        if _is_missing(config, key.name) or OmegaConf.is_interpolation(parent, leaf):
            continue
        value = parent[leaf]
        if isinstance(value, str) and "://" in value:
            continue  # in an object store
        if isinstance(value, str):
            parent[leaf] = str(Path(value).expanduser().absolute())
        elif value:
            parent[leaf] = [str(Path(each).expanduser().absolute()) for each in value]


def _parent(config: DictConfig, name: str) -> DictConfig:
    parent = OmegaConf.select(config, name.rpartition(".")[0]) if "." in name else config
    assert isinstance(parent, DictConfig)
    return parent


def _is_missing(config: DictConfig, name: str) -> bool:
    """Whether the key itself, not something that it refers to, waits for a value."""
    return OmegaConf.is_missing(_parent(config, name), name.rpartition(".")[2]) and not (
        OmegaConf.is_interpolation(_parent(config, name), name.rpartition(".")[2])
    )


def _missing_text(key: Key) -> str:
    return f"{key.name} is not set ({key.text}); give it as {key.name}=<value>."


def _is_group_choice(override: str) -> bool:
    return override.partition("=")[0].lstrip("+~") in GROUPS


def _is_below_free_form(name: str) -> bool:
    """Whether a key lies inside a mapping whose names are free."""
    parents = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]
    return any(each in _KEYS for each in parents)


def _yaml(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}.get(value, str(value)) if isinstance(
        value, (bool, type(None))
    ) else str(value)  # fmt: skip


def _told(error: BaseException) -> str:
    if isinstance(error, yaml.YAMLError):
        return " ".join(str(error).split())
    cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
    return _first_line(cause)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    name = next((line.split(": ", 1)[1] for line in lines if "full_key" in line), "")
    text = lines[0] if lines else type(error).__name__
    return f"{name}: {text}" if name and name not in text else text


@contextmanager
def _hydra(config_dir: Path) -> Iterator[None]:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir), version_base="1.3"):
        yield
