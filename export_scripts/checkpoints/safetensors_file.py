"""The tensors of a safetensors file, after the library has checked its header."""

import struct
from pathlib import Path

from export_scripts.checkpoints.base import StoredTensor, StoredTensors, json_table, truncated
from foundations.errors import CheckpointMismatchError, UnreadTypeError, first_names, listed

_SAFETENSORS_TYPES = {
    "F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_GIT_LFS = b"version https://git-lfs"


def read_safetensors(path: Path) -> tuple[StoredTensors, dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata.

    Raises:
        CheckpointMismatchError: The file is truncated, or inconsistent with its header.
        UnreadTypeError: Tensors have a type that is not supported.
    """
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        if file.read(len(_GIT_LFS)) == _GIT_LFS:
            raise CheckpointMismatchError(
                f"{path} is a Git LFS pointer and not the weights: fetch them with git lfs pull"
            )
        try:
            with safe_open(path, "numpy") as checked:
                facts = checked.metadata() or {}
        except SafetensorError as error:
            raise truncated(path, str(error)) from error
        file.seek(0)
        (length,) = struct.unpack("<Q", file.read(8))
        # The library takes the last of several tensors with one name.
        header = json_table(file.read(length).decode(), f"{path}: its header", is_strict=True)
    header.pop("__metadata__", None)
    if lists := [key for key, entry in header.items() if not isinstance(entry, dict)]:
        # The library also accepts an entry's fields as a list.
        raise truncated(path, f"the entries of {first_names(lists)} in its header are lists")
    unknown = [
        f"tensor {key} is stored as {entry['dtype']}; known types: "
        f"{', '.join(_SAFETENSORS_TYPES)} (convert the unquantised checkpoint)"
        for key, entry in header.items()
        if entry["dtype"] not in _SAFETENSORS_TYPES
    ]
    if unknown:
        raise UnreadTypeError(listed(unknown, f"{path}: "))
    tensors = {
        key: StoredTensor(
            path,
            8 + length + entry["data_offsets"][0],
            _SAFETENSORS_TYPES[entry["dtype"]],
            tuple(entry["shape"]),
        )
        for key, entry in header.items()
    }
    return tensors, facts
