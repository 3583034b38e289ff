"""The command line: options and overrides, including those of the NeMo launcher."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from foundations.suggest import did_you_mean
from launcher_scripts.configuration.compose import OWN_ROOT, ConfigRoot
from launcher_scripts.configuration.diagnosis import likely_key
from launcher_scripts.configuration.schema import CLUSTER_ALIASES, CLUSTERS, KEYS

# Options: short form, long form, and whether a value follows.
_OPTIONS = (
    ("-cp", "--config-path", True),
    ("-cn", "--config-name", True),
    ("-cd", "--config-dir", True),
    ("-c", "--cfg", True),
    ("-h", "--help", False),
    ("-m", "--multirun", False),
    ("", "--resolve", False),  # --cfg always resolves
)
_CLUSTER = ("cluster", "cluster_type")
_NOT_UTF8 = re.compile(r"[\ud800-\udfff]")  # Python decodes such bytes to surrogates
_PLUS_CLUSTER = re.compile(r"\+{1,2}cluster\.([A-Za-z_][\w-]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        overrides: configuration overrides, translated.
        root: where the configuration files are.
        problems: problems of the arguments themselves.
        shows: whether to print the configuration (`--cfg`).
    """

    overrides: Sequence[str]
    root: ConfigRoot
    problems: Sequence[str] = ()
    multirun: bool = False
    wants_help: bool = False
    shows: bool = False


class _Parser(argparse.ArgumentParser):
    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("overrides", nargs="*")
        for short, name, takes_value in _OPTIONS:
            action = "store" if takes_value else "store_true"
            self.add_argument(*filter(None, [name, short]), action=action)

    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(f"{message}; run with --help for the list.")


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Return the parsed command line.

    Raises:
        ValueError: An option lacks its value, or has one that it does not take.
    """
    known, rest = _Parser().parse_known_intermixed_args(list(argv))
    # If there is an unknown option, argparse also returns its value and the overrides.
    unknown = [each for each in rest if each.startswith("-")] or rest
    found = [each for each in rest if "=" in each and each not in unknown]
    names = [name for _, name, _ in _OPTIONS]
    problems = [
        f"unknown argument {word}{did_you_mean(word, names) or likely_key(word)}; run with --help "
        "for the list."
        for word in unknown
    ]
    problems += [
        f"{word!a} is not valid UTF-8, which configurations need; rename the file that it names."
        for word in argv
        if _NOT_UTF8.search(word)
    ]
    words = [*known.overrides, *found]
    if known.cfg not in (None, "job"):
        problems.append(f"--cfg {known.cfg}: write --cfg job, which shows the configuration.")
    extra_dir = _folder(known.config_dir)
    if extra_dir is not None and not extra_dir.is_dir():
        problems.append(f"--config-dir={extra_dir} is not a folder.")
        extra_dir = None
    root = ConfigRoot(
        folder=_folder(known.config_path) or OWN_ROOT.folder,
        name=known.config_name or OWN_ROOT.name,
        extra_dir=extra_dir,
    )
    overrides, more = _translate(words, has_groups=root.has_groups())
    return Arguments(
        overrides=overrides,
        root=root,
        problems=problems + more,
        multirun=bool(known.multirun),
        wants_help=bool(known.help) or "help" in known.overrides,
        shows=known.cfg is not None,
    )


def _translate(overrides: Sequence[str], *, has_groups: bool) -> tuple[list[str], list[str]]:
    """Return the overrides with our keys and values, and the problem of contradictory clusters.

    Without groups, as in a saved configuration, `cluster` cannot choose a file: only `cluster_type`
    is set.
    """
    split = [_sbatch_override(override).partition("=") for override in overrides]
    given = {key: CLUSTER_ALIASES.get(value, value) for key, _, value in split if key in _CLUSTER}
    words = ["".join(each) for each in split if each[0] not in given]
    kind, group = given.get("cluster_type"), given.get("cluster")
    if {kind, group} <= {*CLUSTERS} and kind != group:
        return words, [f"cluster_type={kind} and cluster={group} disagree; give one of them."]
    if group in CLUSTERS and kind is None:
        given["cluster_type"] = group
    elif kind in CLUSTERS and group is None:
        given["cluster"] = kind
    if not has_groups:
        given.pop("cluster", None)
    return [*words, *("=".join(each) for each in given.items())], []


def _sbatch_override(override: str) -> str:
    """Return `+cluster.<sbatch option>=<value>` as an override of a key we have.

    An option without its own key goes to `cluster.additional_parameters`.
    """
    match = _PLUS_CLUSTER.fullmatch(override)
    if match is None:
        return override
    name, value = match.groups()
    if (key := f"cluster.{name.replace('-', '_')}") in KEYS:
        return f"{key}={value}"
    return f"+cluster.additional_parameters.{name}={value}"


def _folder(text: str | None) -> Path | None:
    return None if text is None else Path(text).expanduser().absolute()
