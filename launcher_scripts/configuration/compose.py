"""Composition of the configuration: Hydra merges the files, then plain data is checked and built.

All problems are reported at once: a wrong override is left out, and the rest is composed.
"""

import copy
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, Node, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from foundations.files.json_content import Fields
from foundations.suggest import did_you_mean
from foundations.values import WrongValuesError, build_record, put
from launcher_scripts.configuration.diagnosis import (
    check_override,
    chooses_file,
    error_line,
    first_line,
    key_of,
    read_override,
    unknown_choice,
    unknown_key,
)
from launcher_scripts.configuration.schema import GROUPS, KEYS, SECTIONS, Config
from launcher_scripts.configuration.settings import CHECKOUT, CONFIG_DIR, IS_INSTALLED


@dataclass(frozen=True)
class ConfigRoot:
    """The root file of the configuration, as the command line names it.

    Attributes:
        folder, name: folder and name of the file, with or without its extension.
        extra_dir: a further folder of configuration files.
    """

    folder: Path = CONFIG_DIR
    name: str = "config"
    extra_dir: Path | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{self.name.removesuffix('.yaml')}.yaml"

    def has_file(self, group: str, name: str) -> bool:
        """Return whether a group has a file with this name."""
        folders = filter(None, (self.folder, self.extra_dir))
        file_name = f"{name.removesuffix('.yaml')}.yaml"
        return any(os.access(folder / group / file_name, os.R_OK) for folder in folders)

    def has_groups(self) -> bool:
        """Return whether the root chooses files of groups; a saved configuration has none."""
        text = self.path.read_text(errors="replace") if self.path.is_file() else "defaults:"
        return re.search("^defaults:", text, re.MULTILINE) is not None


OWN_ROOT = ConfigRoot()


@dataclass(frozen=True)
class Composition:
    """A composed configuration.

    Attributes:
        config: the configuration; None if a value or file of it is missing or wrong.
        problems: every problem, one sentence each.
        refused: keys of overrides that were left out; the configuration has their defaults.
    """

    config: Config | None
    problems: Sequence[str] = ()
    refused: frozenset[str] = frozenset()


# If one of these is wrong, the checks would be those of a run that no user asked for.
_DECISIVE = {"action", "cluster_type", "stages"}
# Hydra raises a plain ValueError for some mistakes, such as `export=null`.
_ERRORS = (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError)


@cache
def register() -> None:
    """Register the defaults of all keys, and the resolvers, with Hydra and OmegaConf."""
    values: Fields = {}
    for key in KEYS.values():
        put(values, key.name, key.default)
    ConfigStore.instance().store(name="schema", node=values)
    for name, function in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def _work_dir(scripts: str) -> str:
    """Return the base folder of results: `scripts`, or the current folder if it is installed."""
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

    If a requested file is missing, or a value that decides what runs is wrong, the configuration is
    None: checks of the default in its place would report misleading problems.
    """
    register()
    if not place.path.is_file():
        text = f"configuration {place.path} does not exist; correct --config-path or --config-name."
        return Composition(None, problems=(text,))
    problems = []
    choices = []
    given = []
    refused = set()
    for word in overrides:
        try:
            parsed = read_override(word)
        except ValueError as error:
            problems.append(str(error))
            refused.add(word.lstrip("+~").partition("=")[0])
            continue
        name = parsed.key_or_group
        if problem := check_override(parsed):
            problems.append(problem)
            refused.add(name)
        elif name in GROUPS and not place.has_file(name, value := str(parsed.value())):
            problems.append(unknown_choice(name, value))
            refused.add(name)
        elif chooses_file(name):
            choices.append(str(parsed.input_line))
        else:
            given.append(parsed)
    always = [f"hydra.searchpath=[file://{place.extra_dir}]"] if place.extra_dir else []
    try:
        files, whole = _merged(place, (*always, *choices))
    except _ERRORS as error:
        problems.append(f"{place.path} is unusable: {error_line(error)}.")
        return Composition(None, problems)
    HydraConfig.instance().set_config(whole)
    config, more, left_out = _with_overrides(files, given)
    refused |= left_out
    if any(name in _DECISIVE or chooses_file(name) for name in refused):
        config = None
    return Composition(config, (*problems, *more), frozenset(refused))


@cache
def _merged(place: ConfigRoot, choices: Sequence[str]) -> tuple[DictConfig, DictConfig]:
    """Return the merged files of a root as untyped data, and as Hydra composed them.

    The result is cached: an upgrade or a watch composes many times.

    Raises:
        HydraException, OmegaConfBaseException, ValueError, YAMLError: A file is unusable.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(place.folder), version_base="1.3"):
        config = compose(place.name, overrides=list(choices), return_hydra_config=True)
    values = OmegaConf.to_container(config)
    assert isinstance(values, dict)
    del values["hydra"]
    # A saved configuration does not include the schema, so it may lack new keys' defaults.
    defaults = ConfigStore.instance().load("schema.yaml").node
    made = OmegaConf.merge(OmegaConf.to_container(defaults), values)
    assert isinstance(made, DictConfig)
    return made, config


def _with_overrides(
    files: DictConfig, overrides: Sequence[Override]
) -> tuple[Config | None, list[str], set[str]]:
    """Return the configuration of files and overrides, every problem, and the keys left out.

    A wrong override is left out; a wrong value from a file leaves no configuration.
    """
    problems = []
    left_out = set()
    while True:
        config = copy.deepcopy(files)
        refused = {key_of(override): _apply(config, override) for override in overrides}
        values, wrong = _resolved(config)
        wrong |= {name: text for name, text in refused.items() if text}
        try:
            record = build_record(Config, values)
        except WrongValuesError as error:
            wrong |= error.problems
        typed = wrong.keys() & set(map(key_of, overrides))
        if not typed:
            break
        problems += [text for name, text in wrong.items() if name in typed]
        left_out |= typed
        overrides = [override for override in overrides if key_of(override) not in typed]
    if not wrong:
        return record, problems, left_out
    # A key that refers to a wrong value has the same problem.
    raw, found = flat(config), {name: wrong[name] for name in wrong if name not in left_out}
    causes = [text for name, text in found.items() if "${" not in str(raw.get(name))]
    return None, [*problems, *(causes or found.values())], left_out


def _apply(config: DictConfig, override: Override) -> str:
    """Change a value as Hydra does; return OmegaConf's error, empty if none."""
    name = override.key_or_group
    try:
        if override.is_delete():
            parent, _, leaf = name.rpartition(".")
            entries = OmegaConf.select(config, parent) or {}
            if leaf not in entries:
                return (
                    f"{override.input_line}: {parent} has no {leaf}{did_you_mean(leaf, entries)}."
                )
            del entries[leaf]
        else:
            value = override.value()
            # A mapping is merged into a mapping; any other value replaces it and is refused later.
            is_merged = isinstance(value, dict) and OmegaConf.is_dict(
                OmegaConf.select(config, name)
            )
            OmegaConf.update(config, name, value, force_add=True, merge=is_merged)
    except _ERRORS as error:
        return f"{override.input_line}: {first_line(error)}"
    return ""


def _resolved(config: DictConfig) -> tuple[Fields, dict[str, str]]:
    """Return the resolved values of all keys as plain data, and problems by name."""
    values = {}
    wrong = {}
    for name, raw in flat(config).items():
        if name not in KEYS:
            wrong[name] = unknown_key(f"{name} (in a configuration file)", name)
        elif raw == MISSING:
            wrong[name] = f"{name} is not set ({KEYS[name].text}); give it as {name}=<value>."
        elif not (isinstance(raw, (dict, list)) or "${" in str(raw)):
            values[name] = raw
        else:
            try:
                value = OmegaConf.select(config, name)
                is_node = OmegaConf.is_config(value)
                values[name] = OmegaConf.to_container(value, resolve=True) if is_node else value
            except InterpolationToMissingValueError:
                continue  # the missing key itself is reported
            except OmegaConfBaseException as error:
                reason = str(error).splitlines()[0]
                wrong[name] = (
                    f"{name}={raw}: {reason}; ${{...}} takes a key (--help all lists them), or "
                    "${oc.env:VARIABLE}."
                )
    return values, wrong


def flat(config: DictConfig, prefix: str = "") -> Fields:
    """Return the values of all keys and unknown names, with unresolved references."""
    found: Fields = {}
    for leaf, value in config.items_ex(resolve=False):
        name = prefix + str(leaf)
        if name in SECTIONS and isinstance(value, DictConfig):
            found |= flat(value, f"{name}.")
        else:
            found[name] = value._value() if isinstance(value, Node) else value
    return found
