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

_NODE = "nemo_root"
_OWN_KEYS = frozenset(Config.__dataclass_fields__)


@dataclass(frozen=True)
class ConfigRoot:
    """The root of the configuration, as the command line names it.

    Attributes:
        folder, name: of its file; the name may have its extension.
        extra_dir: a further folder of configuration files.
    """

    folder: Path = CONFIG_DIR
    name: str = "config"
    extra_dir: Path | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{self.name.removesuffix('.yaml')}.yaml"

    def has_groups(self) -> bool:
        """Return whether it chooses files; a saved configuration holds their contents instead."""
        return not self.path.is_file() or "defaults" in _read(self.path)


OWN_ROOT = ConfigRoot()


def read_root(root: ConfigRoot) -> tuple[str, frozenset[str]]:
    """Return the name by which Hydra composes the root, and the names in it that are unknown here.

    One of the NeMo launcher also needs the files of this one.

    Raises:
        YAMLError: the file is not YAML.
    """
    values = _read(root.path)
    defaults = values.get("defaults")
    if not isinstance(defaults, list) or "schema" in defaults:
        return root.name, frozenset()
    groups = {
        str(group).removeprefix("override ").split("@")[0]: choice
        for entry in defaults
        if isinstance(entry, dict)
        for group, choice in entry.items()
    }
    ours = _read(OWN_ROOT.path)
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
    foreign = frozenset(
        name
        for name in (*values, *groups)
        if name.removesuffix("_config") not in (*_OWN_KEYS, "defaults", "hydra")
        and not name.startswith("hydra/")
    )
    return _NODE, foreign


def _read(path: Path) -> dict[str, Any]:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values if isinstance(values, dict) else {}
