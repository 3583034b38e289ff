"""The GPT-J "slim" release of mesh-transformer-jax: step_*/shard_*/<part>.npz.

Every shard folder holds the same unnamed arrays; only their order identifies them. Arrays are
indexed and mapped inside the .npz files, never unpacked.
"""

import tokenize
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from export_scripts.checkpoints.base import (
    CheckpointReader,
    Record,
    StoredTensor,
    json_file,
    truncated,
)
from export_scripts.checkpoints.partitioned import join_ranks, number_in
from export_scripts.checkpoints.pt_archive import zip_data_offset
from export_scripts.numeric.dtypes import Shape
from foundations.errors import CheckpointMismatchError, first_names, refuse
from foundations.files.json_content import Fields

# Order of the arrays: mesh-transformer-jax, to_hf_weights and the release's own writer. Layer
# numbers are sorted as text: 0, 1, 10, 11, ..., 2, 20.
_FIRST = ("wte.bias", "wte.weight")
_LAYER = (
    "q.weight", "v.weight", "k.weight", "out_proj.weight", "c_fc.bias", "c_fc.weight",
    "c_proj.bias", "c_proj.weight", "ln_1.bias", "ln_1.weight",
)  # fmt: skip
_LAST = ("lm_head.bias", "lm_head.weight", "ln_f.bias", "ln_f.weight")

# numpy has no bfloat16 and writes it as a void type of two bytes.
_NPY_TYPES = {"|V2": "bf16", "<V2": "bf16", "<f2": "fp16", "<f4": "fp32"}
_MAX_SHARDS = 10_000


def step_directory(path: Path) -> Path | None:
    """Return the step_* folder that `path` is or contains, or None for other checkpoints."""
    if not path.is_dir():
        return None
    if _shards(path):
        return path
    steps = [entry for entry in path.glob("step_*") if entry.is_dir() and _shards(entry)]
    return max(steps, key=number_in, default=None)


def open_jax(path: Path) -> CheckpointReader:
    """Return the index of a GPT-J release, with one piece of a tensor per shard.

    Tensors are named wte.weight, h.<layer>.q.weight, ...

    Raises:
        CheckpointMismatchError: Shards or parts are missing, disagree, or are not such a release.
    """
    step = step_directory(path)
    assert step is not None, path
    parts = {shard: sorted(shard.glob("*.npz"), key=number_in) for shard in _shards(step)}
    refuse(_shape_problems(step, parts))
    states = {}
    for number, (shard, files) in enumerate(parts.items()):
        arrays = [array for file in files for array in _read_npz(file)]
        names = _names(len(arrays), shard)
        states[number, 0] = dict(zip(names, arrays, strict=True))
    config_files, config = _model_config(step)
    return CheckpointReader(
        format="jax",
        path=path,
        config=config,
        tensors=join_ranks(states, where=step),
        files=(*(file for files in parts.values() for file in files), *config_files),
        remarks=() if step == path else (f"{step.name} of {path} is read",),
    )


def _shards(step: Path) -> list[Path]:
    found = (entry for entry in step.glob("shard_*") if (entry / "0.npz").is_file())
    return sorted(found, key=number_in)


def _shape_problems(step: Path, parts: Mapping[Path, Sequence[Path]]) -> list[str]:
    """Return a problem for each missing shard or part."""
    problems = []
    present = {number_in(shard) for shard in parts}
    if (last := max(present)) >= _MAX_SHARDS:
        return [f"{step} has a shard {last}: expected numbers below {_MAX_SHARDS}; remove it"]
    every = set(map(number_in, step.glob("shard_*"))) | set(range(last + 1))
    if missing := sorted(every - present):
        names = first_names([f"shard_{number}" for number in missing])
        problems.append(f"{step} lacks {names} of {len(every)} shards")
    count = max(len(files) for files in parts.values())
    for shard, files in parts.items():
        lacking = set(range(count)) - set(map(number_in, files))
        problems += [f"{shard} lacks {number}.npz" for number in sorted(lacking)]
    return problems


def _names(count: int, shard: Path) -> list[str]:
    layers, rest = divmod(count - len(_FIRST) - len(_LAST), len(_LAYER))
    if rest or layers < 1:
        raise CheckpointMismatchError(
            f"{shard} holds {count} arrays; a shard of a GPT-J release holds "
            f"{len(_FIRST) + len(_LAST)} and {len(_LAYER)} a layer: a part is missing or truncated"
        )
    order = sorted(range(layers), key=str)
    per_layer = [f"h.{layer}.{name}" for layer in order for name in _LAYER]
    return [*_FIRST, *per_layer, *_LAST]


def _model_config(step: Path) -> tuple[list[Path], Fields]:
    """Return the file of mesh-transformer-jax's JSON configuration and its content, if present."""
    for folder in (step, step.parent):
        for file in sorted(folder.glob("*.json")):
            config = json_file(file)
            if "n_heads" in config:
                return [file], config
    return [], {}


def _read_npz(path: Path) -> list[StoredTensor]:
    """Return the arrays arr_0, arr_1, ... of a file."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = sorted(archive.infolist(), key=lambda info: number_in(Path(info.filename)))
            return [_read_npy(path, file, info) for info in members]
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, OSError) as error:
        raise truncated(path, str(error)) from error


def _read_npy(path: Path, file: BinaryIO, info: zipfile.ZipInfo) -> StoredTensor:
    where = f"{path}:{info.filename}"
    if info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointMismatchError(
            f"{where} is compressed, so it cannot be mapped; save it again with numpy.savez"
        )
    begin = zip_data_offset(path, file, info)
    file.seek(begin)
    shape, kind = _npy_header(file, where)
    if kind not in _NPY_TYPES:
        raise CheckpointMismatchError(
            f"{where} has type {kind!r}; expected bfloat16, float16 or float32"
        )
    record = Record(path, begin, info.file_size, info.CRC)
    tensor = StoredTensor(path, file.tell(), _NPY_TYPES[kind], shape, record=record)
    if tensor.offset + tensor.span_bytes > begin + info.file_size:
        raise truncated(path, f"{info.filename} has {info.file_size} bytes")
    return tensor


def _npy_header(file: BinaryIO, where: str) -> tuple[Shape, str]:
    """Return the shape and the type in the header of a .npy file, whose data follow."""
    from numpy.lib import format as npy

    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        shape, is_fortran, dtype = readers[npy.read_magic(file)](file)
    except (
        ValueError, KeyError, TypeError, MemoryError, RecursionError, SyntaxError,
        tokenize.TokenError,
    ) as error:  # fmt: skip
        raise CheckpointMismatchError(f"{where} has a damaged header: {error}") from error
    if is_fortran or min(shape, default=0) < 0:
        raise CheckpointMismatchError(f"{where} has shape {shape} in Fortran's order")
    return shape, str(dtype) if dtype.fields or dtype.subdtype else dtype.str
