"""A configuration root of the NeMo launcher, read as a root of this one.

Keys that exist here are used, missing ones have the values of conf/config.yaml, and sections of
other stages (training, fine_tuning, ...) are left out and named once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore

from launcher_scripts.configuration.schema import GROUPS, Config
from launcher_scripts.configuration.settings import CONFIG_DIR

CONFIG_NAME = "config"
_NODE = "nemo_root"
_OWN_KEYS = frozenset(Config.__dataclass_fields__)


@dataclass(frozen=True)
class Root:
    """The root file of a composition.

    Attributes:
        name: its name for Hydra.
        searched: further folders with files of groups.
        foreign: names in it that are unknown here.
    """

    name: str
    searched: tuple[Path, ...] = ()
    foreign: frozenset[str] = frozenset()


def root_path(config_dir: Path, config_name: str) -> Path:
    """Return the file of a root, whose name may have its extension."""
    return config_dir / f"{config_name.removesuffix('.yaml')}.yaml"


def has_groups(config_dir: Path, config_name: str) -> bool:
    """Return whether a root chooses files; a saved configuration holds their contents instead."""
    path = root_path(config_dir, config_name)
    return not path.is_file() or "defaults" in _read(path)


def read_root(config_dir: Path, config_name: str) -> Root:
    """Return the root in composable form. Raises YAMLError if the file is not YAML."""
    values = _read(root_path(config_dir, config_name))
    defaults = values.get("defaults")
    if not isinstance(defaults, list) or "schema" in defaults:
        return Root(config_name)
    groups = {
        str(group).removeprefix("override ").split("@")[0]: choice
        for entry in defaults
        if isinstance(entry, dict)
        for group, choice in entry.items()
    }
    ours = _read(root_path(CONFIG_DIR, CONFIG_NAME))
    known = {
        key: value
        for key, value in values.items()
        if key in _OWN_KEYS and key not in GROUPS and value != "???"
    }
    chosen = {name: groups[name] for name in GROUPS if groups.get(name) is not None}
    own = [
        entry if isinstance(entry, str) else {k: chosen.get(k, v) for k, v in entry.items()}
        for entry in ours["defaults"]
    ]
    known["env_vars"] = {**ours["env_vars"], **(known.get("env_vars") or {})}
    ConfigStore.instance().store(name=_NODE, node={**ours, **known, "defaults": own})
    foreign = {
        name
        for name in (*values, *groups)
        if name.removesuffix("_config") not in (*_OWN_KEYS, "defaults", "hydra")
        and not name.startswith("hydra/")
    }
    return Root(_NODE, searched=(CONFIG_DIR,), foreign=frozenset(foreign))


def _read(path: Path) -> dict[str, Any]:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values if isinstance(values, dict) else {}
