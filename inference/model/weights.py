"""One rank's tensors from FT files: only its part, in its type, on its device."""

from __future__ import annotations

import torch

from export_scripts.errors import CheckpointMismatchError
from export_scripts.ft.reader import FTReader
from inference.parallel.layout import ParallelLayout

# Rows of a table on a GPU are a multiple of this. 256 rows of 2048 take cuBLAS 540 us on an H200 to
# 50,257 outputs, whose rows begin at any address, and 82 us to 50,272.
_ROWS_OF_TABLES = 16


class RankWeights:
    """Reads one rank's tensors from a folder that `FTReader` has validated.

    Tensors with values that are not finite are collected for one error that names them all.
    """

    def __init__(
        self,
        reader: FTReader,
        layout: ParallelLayout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        matrix_dtype: torch.dtype | None = None,
    ) -> None:
        """Bind the folder to a rank, which computes in `dtype`.

        `matrix_dtype` is the type of matrices in memory, None for `dtype`.

        Raises:
            CheckpointMismatchError: The folder was split for another number of ranks.
        """
        if reader.tp_size != layout.tp_size:
            raise CheckpointMismatchError(
                f"{reader.path} is split for tensor_para_size={reader.tp_size}, but "
                f"{layout.tp_size} ranks are to load it; convert for {layout.tp_size} or set "
                f"tensor_para_size={reader.tp_size}"
            )
        self.reader = reader
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self._matrix_dtype = matrix_dtype or dtype
        self._unusable: list[str] = []
        self._tables: dict[tuple[str, range, torch.dtype], torch.Tensor] = {}

    def has(self, name: str) -> bool:
        """Return whether the model has the tensor."""
        return self.reader.has(name)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return this rank's part of a tensor, in the computed type unless one is given."""
        return self._checked(name, self.reader.read(name, self.layout.tp_rank), dtype or self.dtype)

    def optional(self, name: str) -> torch.Tensor | None:
        """Return this rank's part of a tensor that not every model has."""
        return self.tensor(name) if self.has(name) else None

    def matrix(self, name: str) -> torch.Tensor:
        """Return a weight as (in, out), axes after the first joined."""
        part = self.reader.read(name, self.layout.tp_rank)
        return self._checked(name, part, self._matrix_dtype).flatten(1)

    def rows(self, name: str, rows: range) -> torch.Tensor:
        """Return some rows of a whole table, or of a vector, in the computed type."""
        return self._part_of_whole(name, rows, self.dtype)[: len(rows)]

    def matrix_rows(self, name: str, rows: range) -> torch.Tensor:
        """Return some rows of a whole table that serves as a matrix, such as the head's.

        On a GPU they end with zeros up to a multiple of 16 rows.
        """
        return self._part_of_whole(name, rows, self._matrix_dtype)

    def _part_of_whole(self, name: str, rows: range, dtype: torch.dtype) -> torch.Tensor:
        # A tied table is asked for twice, for the embedding and the head: a GPU holds it once.
        key = (name, rows, dtype)
        if key not in self._tables:
            part = self.reader.read(name, 0)[rows.start : rows.stop]
            part = self._checked(name, part, dtype)
            more = -len(part) % _ROWS_OF_TABLES if self.device.type == "cuda" else 0
            self._tables[key] = torch.cat((part, part.new_zeros(more, *part.shape[1:])))
        return self._tables[key]

    def mapped(self, name: str) -> torch.Tensor:
        """Return a whole table as it lies on disk, mapped and unchanged; nothing is read yet."""
        return self.reader.read(name, 0)

    def check(self) -> None:
        """Check that all tensors read so far are finite.

        Raises:
            CheckpointMismatchError: naming every tensor that is not.
        """
        if self._unusable:
            raise CheckpointMismatchError(
                f"{self.reader.path}: {name} holds values that are not finite; convert the "
                "checkpoint again"
                for name in self._unusable
            )

    def _checked(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # One pass over the values that are read anyway: a sum shows NaN and infinities.
        values = values.to(self.device)
        total = values.sum(dtype=torch.float32)
        if not torch.isfinite(total) and not torch.isfinite(values).all():
            self._unusable.append(name)
        return values.to(dtype)
