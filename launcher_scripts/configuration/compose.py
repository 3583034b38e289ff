"""Composition of the configuration with Hydra, which reports all problems at once."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import AnyNode, DictConfig, Node, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from export_scripts.suggest import closest
from export_scripts.values import Key
from launcher_scripts.configuration.diagnosis import (
    KEYS,
    InvalidValueError,
    check_names,
    diagnose,
    first_line,
    objection,
)
from launcher_scripts.configuration.nemo_root import CONFIG_NAME, read_root
from launcher_scripts.configuration.schema import GROUPS, Config
from launcher_scripts.configuration.settings import CHECKOUT, CONFIG_DIR


@dataclass(frozen=True)
class Composition:
    """A composed configuration.

    Attributes:
        config: the configuration; None when too much of it is missing or wrong.
        resolved: the same as plain data, in the form that is saved.
        problems: every problem, one sentence each.
        notes: remarks about the files that were used.
    """

    config: Config | None
    resolved: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


_REFERENCE = re.compile(r"\$\{[\w.]+\}")
# Hydra raises a plain ValueError for some mistakes, such as `export=null`.
_OBJECTIONS = (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError)


@functools.cache
def register() -> None:
    """Make the schema and the resolvers known to Hydra and OmegaConf."""
    ConfigStore.instance().store(name="schema", node=schema())
    for name, function in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def schema() -> DictConfig:
    """Return the schema as OmegaConf checks it.

    OmegaConf takes 2 and "on" for true. Truth values keep their spelling here, and `Key` refuses
    such ones.
    """
    made: DictConfig = OmegaConf.structured(Config)
    for key in KEYS.values():
        if bool in key.types:
            parent, leaf = _parent(made, key.name), key.name.rpartition(".")[2]
            old = parent._get_node(leaf)
            assert isinstance(old, Node)
            parent.__dict__["_content"][leaf] = AnyNode(old._value(), key=leaf, parent=parent)
    return made


# multiply, divide_ceil and divide_floor are the names that configurations of the NeMo launcher use.
_RESOLVERS: dict[str, Callable[..., Any]] = {
    "multiply": lambda x, y: x * y,
    "divide_ceil": lambda x, y: int(-(-x // y)),
    "divide_floor": lambda x, y: int(x // y),
    "checkout": lambda: str(CHECKOUT),
    "server_host": lambda cluster: "127.0.0.1" if cluster == "local" else "0.0.0.0",
}


def compose_config(
    overrides: Sequence[str],
    *,
    config_dir: Path = CONFIG_DIR,
    config_name: str = CONFIG_NAME,
    extra_dir: Path | None = None,
) -> Composition:
    """Return the configuration; wrong overrides are reported and left out."""
    register()
    path = config_dir / f"{config_name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        return Composition(None, problems=(f"configuration {path} does not exist.",))
    try:
        root = read_root(config_dir, config_name)
    except (OSError, ValueError, yaml.YAMLError) as error:
        return Composition(None, problems=(f"{path} cannot be read: {objection(error)}.",))
    overrides, foreign = root.without_foreign(overrides)
    folders = [*filter(None, [extra_dir]), *root.searched]
    searched = ",".join(f"file://{each}" for each in folders)
    composer = _Composer(root.name, [f"hydra.searchpath=[{searched}]"] if searched else [])
    notes = _about_other_stages(path, [*root.foreign, *foreign])
    with _hydra(config_dir):
        config, problems = composer.compose_what_works(overrides)
        if config is None:
            return Composition(None, problems=tuple(problems))
        problems += [_missing_text(key) for key in KEYS.values() if _is_missing(config, key.name)]
        if any(_is_missing(config, name) for name in KEYS):
            return Composition(None, problems=tuple(problems))
        try:
            resolved = OmegaConf.to_container(config, resolve=True)
            built = OmegaConf.to_object(config)
        except OmegaConfBaseException as error:
            return Composition(None, problems=(*problems, first_line(error)))
    assert isinstance(built, Config)
    assert isinstance(resolved, dict)
    plain = {str(key): value for key, value in resolved.items()}
    return Composition(built, plain, tuple(problems), notes)


def _about_other_stages(path: Path, foreign: Sequence[str]) -> tuple[str, ...]:
    """Return a remark that names the foreign stages in a root of the NeMo launcher."""
    names = sorted({name.removesuffix("_config") for name in foreign})
    return (f"{path}: not part of this pipeline: {', '.join(names)}",) if names else ()


class _Composer:
    """Composes one root repeatedly, with different overrides."""

    def __init__(self, config_name: str, always: Sequence[str]) -> None:
        self._name = config_name
        self._always = list(always)

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the typed configuration. Raises the errors of Hydra, OmegaConf and the schema."""
        config = self._typed(overrides)
        _check(config)
        return config

    def compose_what_works(self, overrides: Sequence[str]) -> tuple[DictConfig | None, list[str]]:
        """Return the configuration without the overrides that are wrong, and their problems.

        If a requested file is missing, the configuration is None: checks of the default file in its
        place would mislead.
        """
        try:
            return self.compose(overrides), []
        except _OBJECTIONS:
            pass
        try:
            self.compose([])
        except InvalidValueError as error:
            return None, list(error.problems)
        except _OBJECTIONS as error:
            return None, [f"the configuration files are unusable: {objection(error)}."]
        problems: list[str] = []
        # A file is chosen before its keys are set, as Hydra does it.
        chosen = list(filter(_is_group_choice, overrides))
        files = [each for each in chosen if not self._objections(each, problems)]
        config = self._typed(files)
        for override in itertools.filterfalse(_is_group_choice, overrides):
            problems += _override(config, override)
        try:
            _check(config)
        except InvalidValueError as error:
            problems += error.problems
            return None, problems
        return config if files == chosen else None, problems

    def _objections(self, choice: str, problems: list[str]) -> bool:
        """Return whether a file cannot be chosen; adds the reason to `problems`."""
        try:
            self._typed([choice])
        except _OBJECTIONS as error:
            problems += diagnose(choice, error)
            return True
        return False

    def _typed(self, overrides: Sequence[str]) -> DictConfig:
        """Return the configuration with its schema, its values not yet checked."""
        check_names(overrides)
        config = compose(
            self._name, overrides=[*self._always, *overrides], return_hydra_config=True
        )
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
        if OmegaConf.get_type(config) is Config:
            return config
        # A saved configuration does not name the schema.
        typed = OmegaConf.merge(schema(), OmegaConf.to_container(config))
        assert isinstance(typed, DictConfig)
        return typed


def _override(config: DictConfig, override: str) -> list[str]:
    """Apply an override as Hydra does; return its problems if it is left out."""
    put_back = _nothing
    try:
        check_names([override])
        parsed = OverridesParser.create().parse_override(override)
        if parsed.is_sweep_override():
            raise HydraException(override)
        put_back = _restorer(config, parsed.key_or_group)
        ConfigLoaderImpl._apply_overrides_to_config([parsed], config)
        _check(config, below=parsed.key_or_group)
    except _OBJECTIONS as error:
        put_back()
        return diagnose(override, error)
    return []


def _nothing() -> None:
    """Restore nothing: nothing was changed."""


def _restorer(config: DictConfig, name: str) -> Callable[[], None]:
    """Return a function that restores the present value of a key, or of the mapping it joins."""
    parent, leaf = config, name
    for part in name.split("."):
        leaf = part
        node = parent._get_node(part, validate_access=False)  # new names are free in some mappings
        if not isinstance(node, DictConfig) or f"{parent._get_full_key(part)}" == name:
            break
        parent = node
    content = parent.__dict__["_content"]
    before = copy.deepcopy(content.get(leaf)) if isinstance(content, dict) else None

    def put_back() -> None:
        if before is None:
            content.pop(leaf, None)
        else:
            content[leaf] = before

    return put_back


def _check(config: DictConfig, *, below: str = "") -> None:
    """Make paths absolute. Raises InvalidValueError with every problem of the values.

    With `below`, only this key, or the keys of this section, are checked.
    """
    keys = [key for key in KEYS.values() if not below or f"{key.name}.".startswith(f"{below}.")]
    if problems := list(_problems(config, keys)) or list(_make_absolute(config, keys)):
        raise InvalidValueError(*problems)


def _problems(config: DictConfig, keys: Iterable[Key]) -> Iterator[str]:
    """Yield the problems of the values, except of keys that only refer to another key."""
    for key in keys:
        parent, leaf = _parent(config, key.name), key.name.rpartition(".")[2]
        if OmegaConf.is_missing(parent, leaf):
            continue
        try:
            value = OmegaConf.select(config, key.name)
        except OmegaConfBaseException:
            continue  # an interpolation of a missing key, which is reported there
        if _repeats_another(parent, leaf):
            continue
        if found := key.problem(value):
            yield found


def _repeats_another(parent: DictConfig, leaf: str) -> bool:
    """Return whether a value only refers to another key, which has the same problem."""
    node = parent._get_node(leaf)
    text = node._value() if isinstance(node, Node) else None
    return isinstance(text, str) and _REFERENCE.fullmatch(text) is not None


def _make_absolute(config: DictConfig, keys: Iterable[Key]) -> Iterator[str]:
    """Make paths independent of the command's working directory; yield their problems."""
    for key in keys:
        parent, leaf = _parent(config, key.name), key.name.rpartition(".")[2]
        if (
            not key.is_path
            or OmegaConf.is_missing(parent, leaf)
            or OmegaConf.is_interpolation(parent, leaf)
            or not parent[leaf]
        ):
            continue
        try:
            if key.is_list:
                parent[leaf] = [_absolute(each, key.name) for each in parent[leaf]]
            else:
                parent[leaf] = _absolute(parent[leaf], key.name)
        except InvalidValueError as error:
            yield from error.problems


def _absolute(text: str, key: str) -> str:
    """Return the absolute form of a path; links are kept except before '..'.

    `~` and environment variables are replaced where the shell has not done so. A URL of an object
    store stays as it is.
    """
    if "://" in text:
        return text
    path = Path(os.path.expandvars(text))
    if unset := [part for part in path.parts if part.startswith("$")]:
        raise InvalidValueError(f"{key}={text}: {unset[0]} is not set; give the path.")
    try:
        path = path.expanduser().absolute()
    except RuntimeError as error:
        raise InvalidValueError(f"{key}={text}: the user does not exist; give the path.") from error
    return str(path.resolve() if ".." in path.parts else path)


def _parent(config: DictConfig, name: str) -> DictConfig:
    parent = OmegaConf.select(config, name.rpartition(".")[0]) if "." in name else config
    assert isinstance(parent, DictConfig)
    return parent


def _is_missing(config: DictConfig, name: str) -> bool:
    """Return whether the key itself, not a key that it refers to, lacks a value."""
    return OmegaConf.is_missing(_parent(config, name), name.rpartition(".")[2]) and not (
        OmegaConf.is_interpolation(_parent(config, name), name.rpartition(".")[2])
    )


def _missing_text(key: Key) -> str:
    return f"{key.name} is not set ({key.text}); give it as {key.name}=<value>."


def _is_group_choice(override: str) -> bool:
    """Return whether an override chooses a file, or was meant to."""
    name = override.partition("=")[0].lstrip("+~")
    return name in GROUPS or (name not in KEYS and closest(name, GROUPS) is not None)


@contextmanager
def _hydra(config_dir: Path) -> Iterator[None]:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir), version_base="1.3"):
        yield
