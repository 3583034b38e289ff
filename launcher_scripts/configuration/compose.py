"""Composition of the configuration: Hydra merges files, then plain data is checked and built.

Every problem is reported at once. A wrong override is left out, and the rest is composed.
"""

import functools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from export_scripts.suggest import closest
from export_scripts.values import MISSING, Key, built
from launcher_scripts.configuration.diagnosis import (
    InvalidValueError,
    check_name,
    diagnose,
    first_line,
    is_free,
    objection,
    unknown_keys,
)
from launcher_scripts.configuration.nemo_root import OWN_ROOT, ConfigRoot, read_root
from launcher_scripts.configuration.schema import GROUPS, KEYS, Config
from launcher_scripts.configuration.settings import CHECKOUT, IS_INSTALLED


@dataclass(frozen=True)
class Composition:
    """A composed configuration.

    Attributes:
        config: the configuration; None when too much of it is missing or wrong.
        problems: every problem, one sentence each.
        notes: remarks about the files that were used.
    """

    config: Config | None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


_REFERENCE = re.compile(r"\$\{[\w.]+\}")
# Hydra raises a plain ValueError for some mistakes, such as `export=null`.
_OBJECTIONS = (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError)


@functools.cache
def register() -> None:
    """Make the defaults of keys and the resolvers known to Hydra and OmegaConf."""
    values: dict[str, Any] = {}
    for key in KEYS.values():
        _put(values, key.name, key.default)
    ConfigStore.instance().store(name="schema", node=values)
    for name, function in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def _work_dir(scripts: str) -> str:
    """Return where results go: nothing is written to the folder of an installed package."""
    is_package = IS_INSTALLED and Path(scripts) == CHECKOUT / "launcher_scripts"
    return str(Path.cwd()) if is_package else scripts


# multiply, divide_ceil and divide_floor are the names that configurations of the NeMo launcher use.
_RESOLVERS: dict[str, Callable[..., Any]] = {
    "multiply": lambda x, y: x * y,
    "divide_ceil": lambda x, y: int(-(-x // y)),
    "divide_floor": lambda x, y: int(x // y),
    "checkout": lambda: str(CHECKOUT),
    "work_dir": _work_dir,
    "server_host": lambda cluster: "127.0.0.1" if cluster == "local" else "0.0.0.0",
}


def compose_config(overrides: Sequence[str], place: ConfigRoot = OWN_ROOT) -> Composition:
    """Return the configuration; wrong overrides are reported and left out.

    Where a requested file is missing the configuration is None: checks of the default file in its
    place would mislead.
    """
    register()
    path = place.path
    if not path.is_file():
        text = f"configuration {path} does not exist; correct --config-path or --config-name."
        return Composition(None, problems=(text,))
    try:
        root = read_root(place)
    except (OSError, ValueError, yaml.YAMLError) as error:
        return Composition(None, problems=(f"{path} cannot be read: {objection(error)}.",))
    names = [each.lstrip("+~").partition("=")[0].partition(".")[0] for each in overrides]
    # Those of other stages, which the root names, are left out with it.
    pairs = zip(overrides, names, strict=True)
    overrides = [each for each, name in pairs if name not in root.foreign]
    folders = [*filter(None, [place.extra_dir]), *root.searched]
    searched = ",".join(f"file://{each}" for each in folders)
    always = [f"hydra.searchpath=[{searched}]"] if searched else []
    choices = [each for each in overrides if _is_for_hydra(each)]
    problems: list[str] = []
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(place.folder), version_base="1.3"):
        try:
            config = _merged(root.name, [*always, *choices])
            has_files = True
        except _OBJECTIONS:
            try:
                config = _merged(root.name, always)
            except _OBJECTIONS as error:
                text = f"the configuration files are unusable: {objection(error)}."
                return Composition(None, problems=(text,))
            has_files = False
            for each in choices:
                problems += _objections(root.name, always, each)
        for each in overrides:
            if not _is_for_hydra(each):
                problems += _override(config, each)
        resolved, more = _resolved(config)
    problems += [*unknown_keys(config), *more]
    others = ", ".join(sorted({name.removesuffix("_config") for name in root.foreign}))
    notes = (f"{path}: not part of this pipeline: {others}",) if others else ()
    if more or not has_files:
        return Composition(None, problems=tuple(problems))
    return Composition(built(Config, resolved), tuple(problems), notes)


def _is_for_hydra(override: str) -> bool:
    """Return whether an override chooses a file, or was meant to, or is about Hydra itself."""
    name = override.partition("=")[0].lstrip("+~")
    return (
        name in GROUPS
        or name.startswith(("hydra.", "hydra/"))
        or ("." not in name and name not in KEYS and closest(name, GROUPS) is not None)
    )


def _merged(name: str, choices: Sequence[str]) -> DictConfig:
    """Return the files of a root as untyped data. Raises the errors of Hydra and OmegaConf."""
    for each in choices:
        check_name(each)
    config = compose(name, overrides=list(choices), return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    values = OmegaConf.to_container(config)
    assert isinstance(values, dict)
    del values["hydra"]
    # A saved configuration does not name the schema, whose defaults it may lack.
    defaults = ConfigStore.instance().load("schema.yaml").node
    made = OmegaConf.merge(OmegaConf.to_container(defaults), values)
    assert isinstance(made, DictConfig)
    return made


def _objections(name: str, always: Sequence[str], choice: str) -> list[str]:
    """Return why a file cannot be chosen, empty if it can."""
    try:
        _merged(name, [*always, choice])
    except _OBJECTIONS as error:
        return [diagnose(choice, error)]
    return []


def _override(config: DictConfig, override: str) -> list[str]:
    """Apply an override as Hydra does; return its problems if it is left out."""
    try:
        check_name(override)
        parsed = OverridesParser.create().parse_override(override)
        name, value = parsed.key_or_group, parsed.value()
        if parsed.is_sweep_override():
            raise HydraException(override)
        if parsed.is_delete():
            if OmegaConf.select(config, name) is None:
                raise HydraException(override)
            parent, _, leaf = name.rpartition(".")
            del OmegaConf.select(config, parent)[leaf]
        elif name not in KEYS:
            if not is_free(name):
                raise HydraException(override)
            OmegaConf.update(config, name, value, force_add=True)
        else:
            if not (isinstance(value, str) and "${" in value):  # else known once others are
                value = _checked(KEYS[name], value)
            OmegaConf.update(config, name, value)
    except _OBJECTIONS as error:
        return [diagnose(override, error)]
    return []


def _resolved(config: DictConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the values of all keys as plain data, and every problem of theirs."""
    resolved: dict[str, Any] = {}
    problems = []
    for key in KEYS.values():
        section, _, leaf = key.name.rpartition(".")
        parent = OmegaConf.select(config, section) if section else config
        if not isinstance(parent, DictConfig):
            continue  # the section has a value in its place, which is reported as unknown
        raw = OmegaConf.to_container(parent).get(leaf)  # type: ignore[union-attr]
        if raw == MISSING:
            problems.append(f"{key.name} is not set ({key.text}); give it as {key.name}=<value>.")
            continue
        try:
            value = OmegaConf.select(config, key.name)
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            _put(resolved, key.name, _checked(key, value))
        except InterpolationToMissingValueError:
            continue  # the missing key is reported
        except OmegaConfBaseException as error:
            text = first_line(error)
            if not any(each.endswith(text.partition(": ")[2]) for each in problems):
                problems.append(text)  # once for all keys that refer to this one
        except InvalidValueError as error:
            # A value that only refers to another key has the same problem.
            if not (isinstance(raw, str) and _REFERENCE.fullmatch(raw)):
                problems.append(str(error))
        except ValueError:
            problems.append(key.refusal(value))
    return resolved, problems


def _checked(key: Key, value: Any) -> Any:
    """Return a value in the type of its key, a path absolute.

    Raises:
        InvalidValueError: the value is refused.
        ValueError: it has another type.
    """
    value = key.converted(value)
    if found := key.problem(value):
        raise InvalidValueError(found)
    if not key.is_path or not value:
        return value
    if key.is_list:
        return [_absolute(each, key.name) for each in value]
    return _absolute(value, key.name)


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


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    *sections, leaf = name.split(".")
    for each in sections:
        values = values.setdefault(each, {})
    values[leaf] = value
