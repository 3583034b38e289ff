"""Source mappings: one record per source architecture and format of a family."""

import fnmatch
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from export_scripts.checkpoints.base import (
    CheckpointReader,
    FileMaps,
    Files,
    IsPassed,
    Piece,
    Tensors,
    same_values,
)
from export_scripts.checkpoints.tokenizers import SpecialIds, special_ids
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.decoder import PROMPT_TABLE
from export_scripts.families.layout.spec import ModelFamily
from export_scripts.families.mapping.sources import Copy, Sources
from foundations.errors import CheckpointMismatchError, refuse
from foundations.files.json_content import Table

# In a key, between the name of a tensor and the number of the entry of its first axis that is read.
ENTRY = "#"


@dataclass(frozen=True)
class Facts:
    """The facts of a source that a mapping decides from."""

    reader: CheckpointReader
    tp_size: int  # of the folder to write
    weight_data_type: str  # likewise
    given: Mapping[str, str] = field(default_factory=dict)  # config values that the user states
    # Files that will lie in the folder, by their names there.
    tokenizer: Files = field(default_factory=dict)
    prompts: tuple[CheckpointReader, ...] = ()  # opened archives of prompt learning, in order
    ia3: tuple[CheckpointReader, ...] = ()  # of IA3
    ia3_in_place: bool = False  # multiply IA3 scalers into the weights instead of storing them
    adapters: tuple[CheckpointReader, ...] = ()
    activation_ranges: Table | None = None  # of inputs and outputs, for static int8
    # Tensors of the added archives, by the names source mappings use for them.
    extra: Tensors = field(default_factory=dict)
    prefix: str = ""  # of keys, which a source may leave out
    maps: FileMaps = field(default_factory=FileMaps)

    @property
    def config(self) -> Table:
        """The source's configuration as it wrote it."""
        return self.reader.config

    def keys(self) -> Collection[str]:
        """Return the names of all tensors, those of added archives included."""
        return [*self.reader.tensors, *self.extra]

    def resolve(self, key: str) -> str | None:
        """Return the name under which the source stores `key`, or None if it does not.

        A name in the mapping's table may start with a prefix the source leaves out, and end in
        the number of an entry of the first axis, which the tensor has.
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
            KeyError: The source does not hold it.
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

    def fp8(self, key: str) -> tuple[Piece, Piece] | None:
        """Return a matrix that is stored in FP8, and its scales; None for others."""
        return self.reader.fp8.get(self.resolve(key) or "")

    def size(self, key: str, axis: int) -> int:
        """Return the size of a tensor's first piece on an axis.

        Raises:
            CheckpointMismatchError: It is missing, or has fewer axes.
        """
        shape = self.pieces(key)[0].shape if self.has(key) else ()
        if len(shape) <= axis:
            found = list(shape) if self.has(key) else "missing"
            raise CheckpointMismatchError(f"{key} is {found}: expected {axis + 1} axes")
        return shape[axis]

    def rows(self, key: str) -> int:
        """Return the rows of a tensor that training ranks cut on axis 0; 0 if it is absent."""
        pieces = self.pieces(key) if self.has(key) else ()
        return sum(piece.shape[0] for piece in pieces if piece.shape)

    def same_values(self, first: str, second: str) -> bool:
        """Return whether two tensors are stored with the same bytes."""
        return same_values(self.pieces(first), self.pieces(second), self.maps)

    def special_ids(self) -> SpecialIds:
        """Return the special token ids in the tokenizer files, if any."""
        return special_ids(self.tokenizer)

    def with_paths(self, problems: Sequence[str]) -> list[str]:
        """Return problems, with the model's path before those that begin with no checkpoint's."""
        readers = (self.reader, *self.prompts, *self.ia3, *self.adapters)
        known = tuple(str(reader.path) for reader in readers)
        path = self.reader.path
        return [each if each.startswith(known) else f"{path}: {each}" for each in problems]

    def given_int(self, name: str) -> int | None:
        """Return an integer the user states.

        Raises:
            ValueError: It is not an integer.
        """
        text = self.given.get(name)
        if text is None:
            return None
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{name}={text} is not an integer") from None

    def token(self, name: str, *others: int | None) -> int | None:
        """Return a special token: what the user states, or the first of the others that is known.

        Raises:
            ValueError: The user's is not an integer.
        """
        return next((each for each in (self.given_int(name), *others) if each is not None), None)


@dataclass(frozen=True)
class SourceMapping:
    """The mapping of one source architecture and format to a family's layout."""

    name: str  # unique and short, such as "nemo-gpt"
    title: str  # for the support table
    family: ModelFamily
    format: str  # of the readers it applies to
    matches: Callable[[Facts], bool]  # whether a checkpoint is of this kind
    config: Callable[[Facts], FTConfig]
    # For each layout record's name, or a tensor's of which it differs from layer to layer; asked
    # once the config is known.
    weights: Callable[[Facts, Any], Sources]
    unsupported: Callable[[Facts], list[str]] = lambda _: []  # why the layout cannot hold a model
    # Settings by which a model may compute something else, and why; the user may pass each.
    obstacles: Callable[[Facts], Mapping[str, str]] = lambda _: {}
    ignored: tuple[str, ...] = ()  # patterns of source tensors without anything to convert
    copies: Callable[[Facts, Any], tuple[str, ...]] = lambda *_: ()  # such as a tied head
    prefix: str = ""  # of keys, which sources may leave out
    accepts: tuple[str, ...] = ()  # added archives: prompt, ia3, adapter, activation_ranges
    warnings: Callable[[Facts, Any], list[str]] = lambda *_: []  # of a model that converts
    # Configurations in the source's own words that may describe a config, and whether its head
    # equals its embedding, in order of preference; one holds if `config` reads it back as the same
    # architecture. None for formats that are not written.
    written: Callable[[Any, bool], Sequence[Table]] | None = None
    positions: str | None = None  # key of the longest sequence, where the config has none
    nulls: tuple[str, ...] = ()  # settings whose absence is not null to the library
    carried: tuple[str, ...] = ()  # ignored tensors that belong to the model nevertheless

    def sources(self, facts: Facts, config: Any) -> Sources:
        """Return the sources of the layout, as `weights`, those of added prompts included."""
        return {PROMPT_TABLE: Copy("prompt:{task}"), **self.weights(facts, config)}

    def is_ignored(self, key: str) -> bool:
        """Return whether a source tensor has nothing to convert."""
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in self.ignored)

    def reasons(self, facts: Facts) -> list[str]:
        """Return every reason the layout cannot hold a model, each with a checkpoint's path."""
        try:
            return facts.with_paths(self.unsupported(facts))
        except CheckpointMismatchError as error:
            return facts.with_paths(error.problems)

    def checked_config(self, facts: Facts, is_passed: IsPassed = lambda _: False) -> FTConfig:
        """Return the config of a model; `is_passed` as for `judged_obstacles`.

        Raises:
            CheckpointMismatchError: Settings are missing or cannot be represented; all are listed,
                each with a checkpoint's path.
            ValueError: A value that the user states is wrong.
        """
        _, problems = self.judged_obstacles(facts, is_passed)
        try:
            config = self.config(facts)
        except CheckpointMismatchError as error:
            problems = [*error.problems, *problems]
            raise CheckpointMismatchError(facts.with_paths(problems)) from error
        refuse(facts.with_paths(problems))
        return config

    def judged_obstacles(self, facts: Facts, is_passed: IsPassed) -> tuple[list[str], list[str]]:
        """Return remarks on the settings in the way that the user passes, and the other problems.

        `is_passed` says of a name whether the user passes it.
        """
        try:
            found = self.obstacles(facts)
        except CheckpointMismatchError:  # `config` names malformed settings
            return [], []
        passed = [
            f"{why}; passed by --allow-setting" for name, why in found.items() if is_passed(name)
        ]
        problems = [
            f"{why}; if you know that the model computes the same without it, pass it: "
            f"--allow-setting {name}"
            for name, why in found.items()
            if not is_passed(name)
        ]
        return passed, problems
