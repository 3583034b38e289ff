"""Source mappings: a record for each source architecture and format of a family."""

import fnmatch
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from export_scripts.checkpoints.base import (
    CheckpointReader,
    FileMaps,
    Files,
    IsAllowed,
    Piece,
    ScaledPieces,
    Tensors,
    rows_of,
    same_values,
)
from export_scripts.checkpoints.tokenizers import SpecialIds, special_ids
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.decoder import PROMPT_TABLE
from export_scripts.families.layout.spec import ModelFamily, Patterns
from export_scripts.families.mapping.sources import Copy, Keys, Sources
from foundations.errors import CheckpointMismatchError, Reasons, refuse
from foundations.files.json_content import Table
from foundations.suggest import matches_any

# Separates, in a key, a tensor's name and the index of the entry of its first axis that is read.
ENTRY = "#"


@dataclass(frozen=True)
class Facts:
    """A source and the request, as far as a mapping depends on them."""

    reader: CheckpointReader
    tp_size: int  # tensor-parallel size of the folder to write
    weight_data_type: str  # type of the folder to write
    given: Mapping[str, str] = field(default_factory=dict)  # config values that the user states
    # Tokenizer files of the folder to write, by their names there.
    tokenizer: Files = field(default_factory=dict)
    prompts: tuple[CheckpointReader, ...] = ()  # prompt-learning archives, in order
    ia3: tuple[CheckpointReader, ...] = ()  # IA3 archives
    ia3_in_place: bool = False  # multiply IA3 scalers into the weights instead of storing them
    adapters: tuple[CheckpointReader, ...] = ()
    activation_ranges: Table | None = None  # ranges of inputs and outputs, for static int8
    # Tensors of the added archives, by the names that source mappings use.
    extra: Tensors = field(default_factory=dict)
    prefix: str = ""  # prefix of keys that a source may omit
    maps: FileMaps = field(default_factory=FileMaps)

    @property
    def config(self) -> Table:
        """The source's configuration, unchanged."""
        return self.reader.config

    def keys(self) -> Collection[str]:
        """Return the names of all tensors, including those of added archives."""
        return [*self.reader.tensors, *self.extra]

    def resolve(self, key: str) -> str | None:
        """Return the name under which the source stores `key`, or None if it does not.

        A key may have a prefix that the source omits, and end in an `ENTRY` of the tensor.
        """
        name, _, entry = key.partition(ENTRY)
        known = self.reader.tensors
        if entry and int(entry) >= self.rows(name):
            return None
        if name in self.extra or name in known:
            return name
        bare = name.removeprefix(self.prefix)
        return bare if self.prefix and bare in known else None

    def has(self, key: str) -> bool:
        """Return whether the source holds a tensor."""
        return self.resolve(key) is not None

    def has_any(self, pattern: str) -> bool:
        """Return whether a stored name matches a shell pattern."""
        return any(fnmatch.fnmatchcase(key, pattern) for key in self.keys())

    def pieces(self, key: str) -> Sequence[Piece]:
        """Return a tensor's pieces, one per training rank.

        Raises:
            KeyError: The source does not have the tensor.
        """
        name = self.resolve(key)
        if name is None:
            raise KeyError(key)
        found = self.extra[name] if name in self.extra else self.reader.tensors[name]
        _, _, entry = key.partition(ENTRY)
        if not entry:
            return found
        ends = itertools.accumulate(piece.shape[0] for piece in found)
        piece, end = next(each for each in zip(found, ends, strict=True) if int(entry) < each[1])
        return (piece.select(int(entry) - end + piece.shape[0]),)

    def fp8(self, key: str) -> ScaledPieces | None:
        """Return (values, scales) of a matrix stored in FP8; None for other tensors."""
        return self.reader.fp8.get(self.resolve(key) or "")

    def size(self, key: str, axis: int) -> int:
        """Return the size of a tensor's first piece on an axis.

        Raises:
            CheckpointMismatchError: The tensor is missing, or has fewer axes.
        """
        shape = self.pieces(key)[0].shape if self.has(key) else ()
        if len(shape) <= axis:
            found = list(shape) if self.has(key) else "missing"
            raise CheckpointMismatchError(f"{key} is {found}: expected {axis + 1} axes")
        return shape[axis]

    def rows(self, key: str) -> int:
        """Return the number of rows of all pieces of a tensor; 0 if it is missing."""
        return rows_of(self.pieces(key) if self.has(key) else ())

    def same_values(self, first: str, second: str) -> bool:
        """Return whether two tensors are known to have the same values."""
        return same_values(self.pieces(first), self.pieces(second), self.maps)

    def special_ids(self) -> SpecialIds:
        """Return the special token IDs that the tokenizer files state."""
        return special_ids(self.tokenizer)

    def with_paths(self, problems: Sequence[str]) -> list[str]:
        """Return problems, with the model's path before those that begin with no path."""
        readers = (self.reader, *self.prompts, *self.ia3, *self.adapters)
        known = tuple(str(reader.path) for reader in readers)
        path = self.reader.path
        return [each if each.startswith(known) else f"{path}: {each}" for each in problems]

    def given_int(self, name: str) -> int | None:
        """Return an integer that the user states, or None.

        Raises:
            ValueError: The value is not an integer.
        """
        text = self.given.get(name)
        if text is None:
            return None
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{name}={text} is not an integer") from None

    def token(self, name: str, *others: int | None) -> int | None:
        """Return a special token: the user's, or the first of `others` that is known.

        Raises:
            ValueError: The user's value is not an integer.
        """
        return next((each for each in (self.given_int(name), *others) if each is not None), None)


@dataclass(frozen=True)
class SourceMapping:
    """The mapping of a source architecture and format to a family's layout."""

    name: str  # unique and short, such as "nemo-gpt"
    title: str  # for the support table
    family: ModelFamily
    format: str  # format of the readers that it applies to
    matches: Callable[[Facts], bool]  # whether a checkpoint is of this architecture
    config: Callable[[Facts], FTConfig]
    # (facts, config) -> sources by the name of a layout's record, or by a tensor's name if layers
    # differ.
    weights: Callable[[Facts, Any], Sources]
    unsupported: Callable[[Facts], list[str]] = lambda _: []  # why the layout cannot hold a model
    # Setting with which a model may compute something else -> reason. The user may allow each.
    obstacles: Callable[[Facts], Reasons] = lambda _: {}
    ignored: Patterns = ()  # patterns of source tensors that are not converted
    copies: Callable[[Facts, Any], Keys] = lambda *_: ()  # duplicates, as a tied head
    prefix: str = ""  # prefix of keys that sources may omit
    accepts: tuple[str, ...] = ()  # added archives: prompt, ia3, adapter, activation_ranges
    warnings: Callable[[Facts, Any], list[str]] = lambda *_: []  # about a model that converts
    # (config, whether head and embedding are equal) -> candidate configurations of the source's
    # library, in order of preference; a candidate fits if `config` reads the same architecture from
    # it. None for formats that are not written.
    written: Callable[[Any, bool], Sequence[Table]] | None = None
    positions: str | None = None  # key of the longest sequence, if the config has no field for it
    nulls: Keys = ()  # settings whose default in the library is not null
    carried: Patterns = ()  # ignored tensors that are copied to a Hugging Face folder

    def sources(self, facts: Facts, config: Any) -> Sources:
        """Return `weights`, and the source of added prompt tables."""
        return {PROMPT_TABLE: Copy("prompt:{task}"), **self.weights(facts, config)}

    def is_ignored(self, key: str) -> bool:
        """Return whether a source tensor is not converted."""
        return matches_any(key, self.ignored)

    def reasons(self, facts: Facts) -> list[str]:
        """Return every reason why the layout cannot hold a model, each with a checkpoint's path."""
        try:
            return facts.with_paths(self.unsupported(facts))
        except CheckpointMismatchError as error:
            return facts.with_paths(error.problems)

    def checked_config(self, facts: Facts, is_allowed: IsAllowed = lambda _: False) -> FTConfig:
        """Return the config of a model; `is_allowed` as for `judged_obstacles`.

        Raises:
            CheckpointMismatchError: Settings are missing or cannot be represented; all are listed,
                each with a checkpoint's path.
            ValueError: A value that the user states is wrong.
        """
        _, problems = self.judged_obstacles(facts, is_allowed)
        try:
            config = self.config(facts)
        except CheckpointMismatchError as error:
            problems = [*error.problems, *problems]
            raise CheckpointMismatchError(facts.with_paths(problems)) from error
        refuse(facts.with_paths(problems))
        return config

    def judged_obstacles(self, facts: Facts, is_allowed: IsAllowed) -> tuple[list[str], list[str]]:
        """Return remarks on obstacles that the user allows, and problems for the others."""
        try:
            found = self.obstacles(facts)
        except CheckpointMismatchError:  # `config` names malformed settings
            return [], []
        allowed = [
            f"{reason}; passed by --allow-setting"
            for name, reason in found.items()
            if is_allowed(name)
        ]
        problems = [
            f"{reason}; if you know that the model computes the same without it, pass it: "
            f"--allow-setting {name}"
            for name, reason in found.items()
            if not is_allowed(name)
        ]
        return allowed, problems
