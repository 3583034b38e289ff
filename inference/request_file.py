"""The request files of the client: tensors as JSON, and parameters merged over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` merged in: dictionaries merge, anything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def file_tensors(entries: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of a request file's `request` list.

    Raises:
        ValueError: an entry lacks a key, or its data does not fit its dtype.
    """
    read = [_file_tensor(entry, f"request[{number}]") for number, entry in enumerate(entries)]
    if problems := [each for each in read if isinstance(each, str)]:
        raise ValueError("\n".join(problems))
    return dict(each for each in read if not isinstance(each, str))


def _file_tensor(entry: Mapping[str, Any], where: str) -> tuple[str, np.ndarray[Any, Any]] | str:
    """Return the name and value of an entry, or its problem."""
    if missing := [key for key in ("name", "data", "dtype") if key not in entry]:
        return f"{where}: key {missing[0]!r} is missing"
    name, data, dtype = str(entry["name"]), entry["data"], entry["dtype"]
    try:
        if dtype not in ("object", "bytes", "str"):
            return name, _exact(data, np.dtype(dtype))
        array = np.array(data, dtype=object)
    except (TypeError, ValueError, OverflowError) as error:
        reason = "rows differ in length; pad them" if "inhomogeneous" in str(error) else error
        return f"{where} ({name}): {reason}"
    texts = [str(value).encode() for value in array.reshape(-1)]
    return name, np.array(texts, dtype=object).reshape(array.shape)


def _exact(data: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return data as an array of a type. Raises ValueError if integers would change."""
    given = np.array(data)
    array = given.astype(dtype)
    if dtype.kind in "iub" and given.size and not np.array_equal(given, array):
        raise ValueError(f"{given[given != array].flat[0]} does not fit {dtype}")
    return array
