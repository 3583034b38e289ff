"""Conversion of values to tensors: for text requests, request files and a model's types."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_FLOAT_TYPES = ("FP16", "FP32", "BF16")


def as_tensor(values: Sequence[Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return a row for each value, in Triton's `dtype`: (B, 1), or (B, ...) for arrays.

    Raises ValueError if a value does not fit the type.
    """
    if dtype == "BYTES":
        column = np.empty((len(values), 1), dtype=object)
        column[:, 0] = [value.encode() if isinstance(value, str) else value for value in values]
        return column
    from tritonclient.utils import triton_to_np_dtype

    kind = np.dtype(triton_to_np_dtype(dtype))
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        for value in values:
            if isinstance(value, int) and not limits.min <= value <= limits.max:
                raise ValueError(
                    f"{value!r} is not a valid {dtype}: it must be {limits.min} to {limits.max}."
                )
    try:
        column = np.array(values, dtype=kind)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{values[0]!r} is not a valid {dtype}: {error}") from error
    return column[:, None] if column.ndim == 1 else column


def as_texts(tensor: np.ndarray[Any, Any]) -> list[list[str]]:
    """Return a (B, K) or (B,) tensor of bytes as lists of texts, one list per row."""
    rows = tensor.reshape(len(tensor), -1)
    return [[bytes(value).decode(errors="replace") for value in row] for row in rows]


def typed_tensor(
    value: np.ndarray[Any, Any], declared: str | None
) -> tuple[np.ndarray[Any, Any], str]:
    """Return an input with its Triton type; floats are cast to the declared precision."""
    from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

    if value.dtype.kind == "f" and declared in _FLOAT_TYPES:
        # numpy has no BF16: tritonclient uses ml_dtypes since 2.70, float32 before.
        return value.astype(triton_to_np_dtype(declared), copy=False), declared
    return value, np_to_triton_dtype(value.dtype)


def file_tensors(entries: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of a request file's `request` list.

    Raises ValueError if an entry lacks a key, or its data does not fit its dtype.
    """
    read = [_file_tensor(entry, f"request[{number}]") for number, entry in enumerate(entries)]
    if problems := [result for result in read if isinstance(result, str)]:
        raise ValueError("\n".join(problems))
    return dict(result for result in read if not isinstance(result, str))


def _file_tensor(entry: Mapping[str, Any], where: str) -> tuple[str, np.ndarray[Any, Any]] | str:
    """Return the name and value of an entry, or its problem."""
    if missing := [key for key in ("name", "data", "dtype") if key not in entry]:
        return f"{where}: key {missing[0]!r} is missing"
    name, data, dtype = str(entry["name"]), entry["data"], entry["dtype"]
    try:
        if dtype in ("object", "bytes", "str"):
            array = np.array(data, dtype=object)
            texts = [str(value).encode() for value in array.reshape(-1)]
            return name, np.array(texts, dtype=object).reshape(array.shape)
        kind, values = np.dtype(dtype), np.array(data)
        array = values.astype(kind)
        if kind.kind in "iub" and values.size and not np.array_equal(values, array):
            raise ValueError(f"{values[values != array].flat[0]} does not fit {kind}")
    except (TypeError, ValueError, OverflowError) as error:
        reason = "rows differ in length; pad them" if "inhomogeneous" in str(error) else error
        return f"{where} ({name}): {reason}"
    return name, array
