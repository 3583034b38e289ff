"""Compose the configuration with Hydra and say clearly what is wrong with it, all at once."""

from __future__ import annotations

import functools
import math
import os
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
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from launcher_scripts.checkout import CHECKOUT, CONFIG_DIR
from launcher_scripts.config import GROUPS, Config
from launcher_scripts.diagnosis import (
    KEYS,
    InvalidValueError,
    check_names,
    diagnose,
    first_line,
    shown,
    told,
)
from launcher_scripts.option import Key
from launcher_scripts.suggest import closest, did_you_mean

CONFIG_NAME = "config"


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


# Hydra says some of what it objects to as a plain ValueError, such as `export=null`.
_OBJECTIONS = (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError)


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
        problems += [_missing_text(key) for key in KEYS.values() if _is_missing(config, key.name)]
        if any(_is_missing(config, name) for name in KEYS):
            return Composition(None, choices=choices, problems=tuple(problems))
        try:
            resolved = OmegaConf.to_container(config, resolve=True)
            built = OmegaConf.to_object(config)
        except OmegaConfBaseException as error:
            return Composition(None, choices=choices, problems=(*problems, first_line(error)))
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
        check_names(overrides)
        config = compose(
            self._name, overrides=[*self._always, *overrides], return_hydra_config=True
        )
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
        typed = _typed(config)
        _check_values(typed)
        _make_absolute(typed)
        return typed

    def compose_what_works(self, overrides: Sequence[str]) -> tuple[DictConfig | None, list[str]]:
        """Return the configuration without the overrides that are wrong, and their problems.

        Without a file that was asked for there is no configuration: what other checks would say
        of the default file in its place is of no use to anybody.
        """
        try:
            return self.compose(overrides), []
        except _OBJECTIONS:
            pass
        try:
            config = self.compose([])
        except _OBJECTIONS as error:
            return None, [f"the configuration files cannot be used: {told(error)}."]
        good: list[str] = []
        problems: list[str] = []
        # A file is chosen before its keys are set, as Hydra does it.
        lacks_file = False
        for override in sorted(overrides, key=lambda each: not _is_group_choice(each)):
            composed, problem = self._try(good, override)
            if composed is None:
                problems.append(problem)
                lacks_file |= _is_group_choice(override)
            else:
                config = composed
                good.append(override)
        return None if lacks_file else config, problems

    def _try(self, good: Sequence[str], override: str) -> tuple[DictConfig | None, str]:
        try:
            return self.compose([*good, override]), ""
        except _OBJECTIONS as error:
            return None, diagnose(override, error)


def _typed(config: DictConfig) -> DictConfig:
    """Return the configuration with its schema: a saved file has none yet."""
    if OmegaConf.get_type(config) is Config:
        return config
    plain = OmegaConf.to_container(config)
    typed = OmegaConf.merge(OmegaConf.structured(Config), plain)
    assert isinstance(typed, DictConfig)
    return typed


def _check_values(config: DictConfig) -> None:
    """Refuse empty paths, values not among the choices or too small, and lists inside lists."""
    for key in KEYS.values():
        is_list = typing.get_origin(key.type) is list
        if not key.choices and key.minimum is None and not is_list and not key.is_path:
            continue
        if _is_missing(config, key.name):
            continue
        try:
            value = OmegaConf.select(config, key.name)
        except OmegaConfBaseException:
            continue  # an interpolation of something that is missing, which is told elsewhere
        if is_list and any(OmegaConf.is_config(each) for each in value):
            raise InvalidValueError(
                f"{key.name}={value}: expected a list of single values such as [a,b] ({key.text})."
            )
        if key.is_path and value == "":
            raise InvalidValueError(
                f"{key.name}= is empty ({key.text}); give a path (was a variable of the shell "
                "not set?)."
            )
        if key.choices and not any(value == each for each in key.choices):
            known = [shown(each) for each in key.choices]
            raise InvalidValueError(
                f"{key.name}={shown(value)}: {key.text}{did_you_mean(str(value), known)}; "
                f"use one of {', '.join(dict.fromkeys(known))}."
            )
        if key.minimum is not None and value is not None and not key.minimum <= value < math.inf:
            kind = "" if math.isfinite(value) else "a finite number of "
            raise InvalidValueError(
                f"{key.name}={shown(value)}: {key.text}; must be {kind}at least {key.minimum:g}."
            )


def _make_absolute(config: DictConfig) -> None:
    """Make paths independent of the folder in which the command was typed."""
    for key in KEYS.values():
        if not key.is_path:
            continue
        parent, leaf = _parent(config, key.name), key.name.rpartition(".")[2]
        if _is_missing(config, key.name) or OmegaConf.is_interpolation(parent, leaf):
            continue
        value = parent[leaf]
        if isinstance(value, str) and "://" in value:
            continue  # in an object store
        if isinstance(value, str):
            parent[leaf] = _absolute(value, key.name)
        elif value:
            parent[leaf] = [_absolute(each, key.name) for each in value]


def _absolute(text: str, key: str) -> str:
    """Return one name for a path wherever it is written; links are kept but before '..'.

    `~` and variables of the environment are replaced where the shell has not done so.
    """
    path = Path(os.path.expandvars(text))
    if unset := [part for part in path.parts if part.startswith("$")]:
        raise InvalidValueError(f"{key}={text}: {unset[0]} is not set; give the path.")
    try:
        path = path.expanduser().absolute()
    except RuntimeError as error:
        raise InvalidValueError(f"{key}={text}: there is no such user; give the path.") from error
    return str(path.resolve() if ".." in path.parts else path)


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
    """Whether a file is chosen, or was meant to be."""
    name = override.partition("=")[0].lstrip("+~")
    return name in GROUPS or (name not in KEYS and closest(name, GROUPS) is not None)


@contextmanager
def _hydra(config_dir: Path) -> Iterator[None]:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir), version_base="1.3"):
        yield
