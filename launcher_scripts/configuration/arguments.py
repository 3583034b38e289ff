"""The command line: Hydra's arguments, and those of the NeMo launcher, translated."""

import argparse
import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.utils import get_args_parser

from export_scripts.suggest import did_you_mean
from launcher_scripts.configuration.diagnosis import (
    hydra_text,
    key_of,
    likely_key,
    read_override,
)
from launcher_scripts.configuration.nemo_root import OWN_ROOT, ConfigRoot
from launcher_scripts.configuration.schema import CLUSTER_ALIASES, CLUSTERS, KEYS

SHELL_COMPLETION = "--shell-completion"
_NOT_UTF8 = re.compile(r"[\ud800-\udfff]")  # Python decodes such bytes to surrogates
_PLUS_CLUSTER = re.compile(r"\+{1,2}cluster\.([A-Za-z_][\w-]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        overrides: configuration overrides, translated.
        root: that of the configuration.
        problems: problems of the words themselves.
        hydra_flags: arguments that Hydra answers itself (`--cfg`, `--info`, ...); usually none.
    """

    overrides: tuple[str, ...]
    root: ConfigRoot
    problems: tuple[str, ...] = ()
    multirun: bool = False
    wants_help: bool = False
    hydra_flags: tuple[str, ...] = ()


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Return the parsed command line."""
    parser = get_args_parser()
    known, rest = parser.parse_known_intermixed_args(list(argv))
    # Next to an unknown option, argparse returns the overrides too, and its value.
    unknown = [each for each in rest if each.startswith("-")] or rest
    found = [each for each in rest if "=" in each and each not in unknown]
    problems = [
        f"unknown argument {each}{likely_key(each)}; run with --help for the list."
        for each in unknown
    ]
    problems += [
        f"{each!a} is not UTF-8, the encoding of configurations; rename the file that it names."
        for each in argv
        if _NOT_UTF8.search(each)
    ]
    words = [*known.overrides, *found]
    names = [each for each in words if "=" not in each]
    if names and "action=compare" in words:  # the runs to compare
        runs = ",".join(map(hydra_text, names))
        words = [*(each for each in words if "=" in each), f"runs=[{runs}]"]
    extra_dir = _folder(known.config_dir)
    if extra_dir is not None and not extra_dir.is_dir():
        problems.append(f"--config-dir={extra_dir} is not a folder.")
        extra_dir = None
    root = ConfigRoot(
        folder=_folder(known.config_path) or OWN_ROOT.folder,
        name=known.config_name or OWN_ROOT.name,
        extra_dir=extra_dir,
    )
    overrides, more = _translate(words, chooses_files=root.has_groups())
    return Arguments(
        overrides=tuple(overrides),
        root=root,
        problems=(*problems, *more),
        multirun=bool(known.multirun),
        wants_help=bool(known.help) or "help" in known.overrides,
        hydra_flags=tuple(_hydra_flags(known)),
    )


def _hydra_flags(known: argparse.Namespace) -> Iterator[str]:
    """Yield the arguments that Hydra answers itself, without running anything."""
    for name in ("hydra_help", "shell_completion"):
        if getattr(known, name):
            yield f"--{name.replace('_', '-')}"
    for name in ("cfg", "info"):
        if getattr(known, name):
            yield from (f"--{name}", getattr(known, name))
    if known.cfg and known.package:
        yield from ("--package", known.package)
    if known.cfg and known.resolve:
        yield "--resolve"


def _translate(overrides: Sequence[str], *, chooses_files: bool) -> tuple[list[str], list[str]]:
    """Return overrides with our keys, and the problems of those that have no translation.

    A saved configuration has no files to choose from: there `cluster_type` is used alone.
    """
    translated = [_pass_through(each) for each in overrides]
    chosen = {
        key: value
        for key, _, value in (each.partition("=") for each in translated)
        if key in ("cluster", "cluster_type")
    }
    if not chosen:
        return translated, []
    rest = [each for each in translated if each.partition("=")[0] not in chosen]
    names = {key: CLUSTER_ALIASES.get(value, value) for key, value in chosen.items()}
    kind = names["cluster_type" if "cluster_type" in names else "cluster"]
    group = names.get("cluster", kind)
    if "cluster_type" in names and kind not in CLUSTERS:
        hint = did_you_mean(kind, (*CLUSTERS, *CLUSTER_ALIASES))
        known = ", ".join(CLUSTERS)
        return rest, [f"cluster_type={kind}: unknown cluster{hint}; known clusters: {known}."]
    if kind in CLUSTERS and group in CLUSTERS and kind != group:
        return rest, [
            f"cluster_type={chosen['cluster_type']} and cluster={chosen['cluster']} disagree; "
            "give one of them."
        ]
    if "cluster_type" not in names:
        if group not in CLUSTERS:
            return translated, []  # a file of the user's own: it needs cluster_type as well
        kind = group
    files = [f"cluster={group}"] if chooses_files else []
    return [*rest, *files, f"cluster_type={kind}"], []


def for_hydra(words: Sequence[str]) -> list[str]:
    """Return overrides as Hydra takes them: its quotes, and ++ in mappings with free names."""
    found = []
    for each in words:
        with contextlib.suppress(ValueError):  # composing has reported it
            parsed = read_override(each)
            is_new = key_of(parsed) != parsed.key_or_group or isinstance(parsed.value(), dict)
            sign = "++" if is_new and not each.startswith(("+", "~")) else ""
            found.append(f"{sign}{parsed.input_line}")
    return found


def _pass_through(override: str) -> str:
    """Return an override of an option of sbatch without a key as that of the mapping of these."""
    match = _PLUS_CLUSTER.fullmatch(override)
    if match is None:
        return override
    name, value = match.groups()
    if f"cluster.{name}" in KEYS:
        return f"cluster.{name}={value}"
    return f"+cluster.additional_parameters.{name}={value}"


def _folder(text: str | None) -> Path | None:
    return None if text is None else Path(text).expanduser().absolute()
