"""Memory-mapped tensors of the ranks of an FT folder, which is checked first."""

import math
import os
from pathlib import Path

import torch

from export_scripts.ft.validation import open_directory
from export_scripts.numeric.dtypes import torch_dtype


class FTReader:
    """The tensors of an FT folder.

    Opening checks the set of files and every size; contents are mapped when they are read.

    Raises:
        CheckpointMismatchError: The folder differs from its config.ini.
    """

    def __init__(self, ft_dir: Path | str) -> None:
        self.path = Path(ft_dir)
        self.family, self.config, self._tensors = open_directory(self.path)
        self.tp_size = self.config.tensor_para_size
        self.weight_data_type = self.config.weight_data_type
        # Inputs per scale of matrices in FP8, 0: all; None if they are not in FP8.
        self.fp8_group: int | None = getattr(self.config, "fp8_group_size", None)

    def has(self, name: str) -> bool:
        """Return whether the folder holds a tensor called `name`, the stem of its file."""
        return name in self.names()

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, in layout order."""
        return tuple(name for name, each in self._tensors.items() if each.fp8_part != 1)

    def read(self, name: str, tp_rank: int = 0) -> torch.Tensor:
        """Return rank `tp_rank`'s part of a tensor, mapped copy-on-write from its file.

        A matrix in FP8 is widened to fp32.

        Raises:
            KeyError: The folder does not hold the tensor.
        """
        found = self.in_fp8(name, tp_rank)
        if found is None:
            return self._mapped(name, tp_rank)
        values, scale = found
        groups = scale.repeat_interleave(self.group_inputs(values, scale), dim=0)
        return values.float().mul_(groups[: len(values)])

    def in_fp8(self, name: str, tp_rank: int = 0) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a matrix (in, out) stored in FP8, and its scales; None for other tensors.

        The scales (groups, out) are fp32; each is for `group_inputs` inputs.
        """
        if self._tensors[name].fp8_part is None:
            return None
        return self._mapped(name, tp_rank), self._mapped(f"{name}_scale", tp_rank)

    def group_inputs(self, values: torch.Tensor, scale: torch.Tensor) -> int:
        """Return the number of inputs per scale of a matrix."""
        return self.fp8_group if self.fp8_group and len(scale) > 1 else len(values)

    def _mapped(self, name: str, tp_rank: int) -> torch.Tensor:
        tensor = self._tensors[name]
        dtype = torch_dtype(tensor.dtype or self.weight_data_type)
        shape = tensor.local_shape(self.tp_size)
        # Unlike Python's mmap, torch closes the file after mapping it. It needs a UTF-8 path, also
        # in an interpreter with an ASCII locale, such as tritonserver's.
        path = os.fsencode(self.path / tensor.file_name(tp_rank)).decode()
        return torch.from_file(path, shared=False, size=math.prod(shape), dtype=dtype).view(shape)
