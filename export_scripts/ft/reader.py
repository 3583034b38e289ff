"""Memory-mapped tensors of one rank of an FT folder, which is checked first."""

import math
import os
from pathlib import Path

import torch

from export_scripts.ft.validation import open_directory
from export_scripts.numeric.dtypes import torch_dtype


class FTReader:
    """The tensors of one FT folder.

    Opening checks the exact set of files and every size; contents are mapped when read.

    Raises:
        CheckpointMismatchError: The folder is not exactly what its config.ini describes.
    """

    def __init__(self, ft_dir: Path | str) -> None:
        self.path = Path(ft_dir)
        self.family, self.config, self._tensors = open_directory(self.path)
        self.tp_size = self.config.tensor_para_size
        self.weight_data_type = self.config.weight_data_type

    def has(self, name: str) -> bool:
        """Return whether the folder holds a tensor called `name` (the file's stem)."""
        return name in self._tensors

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, in layout order."""
        return tuple(self._tensors)

    def read(self, name: str, tp_rank: int = 0) -> torch.Tensor:
        """Return rank `tp_rank`'s part of a tensor, mapped copy-on-write from its file.

        Raises:
            KeyError: The folder does not hold it.
        """
        tensor = self._tensors[name]
        dtype = torch_dtype(tensor.dtype or self.weight_data_type)
        shape = tensor.local_shape(self.tp_size)
        # torch closes a file that it has mapped; Python's mmap would keep it open. It takes UTF-8,
        # also in an interpreter whose locale is ASCII, such as tritonserver's.
        path = os.fsencode(self.path / tensor.file_name(tp_rank)).decode()
        return torch.from_file(path, shared=False, size=math.prod(shape), dtype=dtype).view(shape)
