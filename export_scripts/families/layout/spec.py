"""A family and its tensors.

A layout is a table next to this module: the name of each file, its shape in names of config fields,
the axis that is split among tensor-parallel ranks, and which models have it. Nothing here imports
numpy.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_scripts.families.layout.config import FTConfig, Index, Sections
from export_scripts.numeric.dtypes import Shape, item_size
from foundations.files.json_content import Table
from foundations.tables import read_cells

# Conditions on config fields or properties: all must be true (with "not " before: false), or equal
# the value after "="; a tuple has an entry per layer.
When = tuple[str, ...]
Patterns = tuple[str, ...]  # shell patterns of names

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class FTTensor:
    """A tensor of an FT folder."""

    name: str  # file stem, with indices filled in
    shape: Shape  # the whole shape, before a split
    split: int | None = None  # axis split among tensor-parallel ranks; None: one copy for all
    dtype: str | None = None  # type on disk; None: the folder's weight_data_type
    optional: bool = False  # no loader reads it: a folder without it is complete
    # 0: values of a matrix in FP8; 1: its scales; None: another tensor.
    fp8_part: int | None = None

    def file_name(self, tp_rank: int = 0) -> str:
        """Return the name of the file that rank `tp_rank` reads."""
        return f"{self.name}.bin" if self.split is None else f"{self.name}.{tp_rank}.bin"

    def file_names(self, tp_size: int) -> tuple[str, ...]:
        """Return the names of all files of this tensor."""
        return tuple(self.file_name(rank) for rank in range(1 if self.split is None else tp_size))

    def local_shape(self, tp_size: int) -> Shape:
        """Return the shape of one file.

        Raises:
            ValueError: `tp_size` does not divide the split axis.
        """
        if self.split is None:
            return self.shape
        size = self.shape[self.split]
        if size % tp_size:
            raise ValueError(f"{self.name}: axis of {size} does not divide by {tp_size} ranks")
        shape = list(self.shape)
        shape[self.split] = size // tp_size
        return tuple(shape)

    def file_bytes(self, tp_size: int, weight_data_type: str) -> int:
        """Return the size of a file in bytes."""
        return math.prod(self.local_shape(tp_size)) * item_size(self.dtype or weight_data_type)


@dataclass(frozen=True)
class WeightSpec:
    """A record of a layout."""

    name: str  # file stem, with placeholders such as {layer} and {task}
    shape: tuple[str | int, ...]  # whole shape; `FTConfig.dim` computes the sizes
    _: dataclasses.KW_ONLY
    split: int | None = None  # axis split among tensor-parallel ranks; None: one copy for all
    when: When = ()  # conditions of a model that has the tensor
    dtype: str | None = None  # type on disk; None: the folder's weight_data_type
    optional: bool = False  # no loader reads it; written so that the source can be restored

    def expand(self, config: FTConfig) -> Iterator[tuple[Index, FTTensor]]:
        """Yield (index, tensor) for every tensor of a model that the record describes."""
        held = [_holds(config, condition) for condition in self.when]
        if False in held:
            return
        names = _PLACEHOLDER.findall(self.name)
        for values in itertools.product(*(config.index_values(name) for name in names)):
            index = dict(zip(names, values, strict=True))
            if not all(each is True or each[index["layer"]] for each in held):
                continue
            shape = tuple(config.dim(size, index) for size in self.shape)
            name = self.name.format(**index)
            yield index, FTTensor(name, shape, self.split, self.dtype, self.optional)


def _stored(tensor: FTTensor, config: FTConfig) -> tuple[FTTensor, ...]:
    """Return what a folder stores for a tensor: of a matrix in FP8, values and scales."""
    group = getattr(config, "fp8_group_size", None)
    is_matrix = tensor.name.startswith("model.layers.") and len(tensor.shape) == 2
    if group is None or not is_matrix:
        return (tensor,)
    inputs, outputs = tensor.shape
    values = dataclasses.replace(tensor, dtype="fp8", fp8_part=0)
    return values, FTTensor(
        f"{tensor.name}_scale",
        (-(-inputs // group) if group else 1, outputs),
        None if tensor.split == 0 and not group else tensor.split,
        "fp32",
        fp8_part=1,
    )


def _holds(config: FTConfig, condition: str) -> Any:
    """Return whether a condition holds, or for each layer whether it does."""
    name, _, value = condition.removeprefix("not ").partition("=")
    found, is_wanted = getattr(config, name), not condition.startswith("not ")
    if isinstance(found, tuple):
        return tuple(bool(each == value if value else each) is is_wanted for each in found)
    return bool(found == value if value else found) is is_wanted


Layout = tuple[WeightSpec, ...]


def layout_table(family: str) -> Layout:
    """Return the records of a family's table; - is an empty column.

    Sizes (see `FTConfig.dim`) are separated by spaces, conditions by commas; `stored` is a type on
    disk, or `optional`.
    """
    _, *rows = read_cells(Path(__file__).with_name(f"{family}.tsv"))
    return tuple(_spec(*row) for row in rows)


def _spec(name: str, shape: str, split: str, when: str, stored: str) -> WeightSpec:
    return WeightSpec(
        name,
        tuple(int(size) if size.isdecimal() else size for size in shape.split()),
        split=None if split == "-" else int(split),
        when=() if when == "-" else tuple(when.split(", ")),
        dtype=None if stored in ("-", "optional") else stored,
        optional=stored == "optional",
    )


@dataclass(frozen=True)
class ModelFamily:
    """A model family, without its source mappings."""

    name: str  # key of the table of families
    model_type: str  # its name in config.pbtxt for NVIDIA's backend
    config: type[FTConfig]
    layout: Layout
    # Config fields or properties that the tensor-parallel size must divide.
    divisible: tuple[str, ...] = ("head_num", "inter_size")
    unread: Patterns = ()  # patterns of other converters' files that no loader reads
    ft_backend: bool = True  # whether NVIDIA's FasterTransformer backend can serve it
    has_shards: bool = True  # False: it is only written as a Hugging Face folder
    # Whether a config.ini is this family's, if two families share a main section.
    owns: Callable[[Sections], bool] = lambda _: True
    # (config of a folder, names of its tensors) -> sources of the tensors whose values or shapes
    # depend on the number of ranks (`families.mapping.sources`).
    rank_dependent: Callable[[Any, Collection[str]], Table] = lambda *_: {}

    def expand(self, config: FTConfig) -> Iterator[tuple[WeightSpec, Index, FTTensor]]:
        """Yield (record, index, tensor) for every tensor of a folder, in the layout's order."""
        for spec in self.layout:
            for index, tensor in spec.expand(config):
                yield from ((spec, index, each) for each in _stored(tensor, config))

    def tp_sizes(self, config: FTConfig) -> list[int]:
        """Return the tensor-parallel sizes up to 128 that divide a model."""
        return [n for n in range(1, 129) if self.is_divisible(config, n)]

    def is_divisible(self, config: FTConfig, tp_size: int) -> bool:
        """Return whether `tp_size` ranks can share a model; some sizes depend on `tp_size`."""
        split = dataclasses.replace(config, tensor_para_size=tp_size)
        return all(split.dim(name, {}) % tp_size == 0 for name in self.divisible)

    def tensors(self, config: FTConfig) -> tuple[FTTensor, ...]:
        """Return every tensor that a folder must hold."""
        return tuple(tensor for _, _, tensor in self.expand(config) if not tensor.optional)
