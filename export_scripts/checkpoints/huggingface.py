"""Hugging Face folders: config.json, safetensors or torch .bin files, single or indexed."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.base import (
    SOURCE_TYPES,
    CheckpointReader,
    StoredTensor,
    TokenizerFile,
    json_file,
    json_table,
    truncated,
)
from export_scripts.checkpoints.partitioned import flatten
from export_scripts.checkpoints.pt_archive import read_torch_file
from export_scripts.checkpoints.tokenizers import HUGGINGFACE_FILES
from export_scripts.errors import CheckpointMismatchError, listed, refuse

CONFIG_NAME = "config.json"

_SAFETENSORS_TYPES = {
    "F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000
_GIT_LFS = b"version https://git-lfs"

# Preferred first; each with the index that names its shards and the pattern of lone shards.
_WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json", "model*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin"),
)

# Unsupported forms of weights -> the remedy.
_RESAVE = "load it with a release of transformers that reads it, and save_pretrained"
_MERGE = "convert its model, and name it as a LoRA checkpoint to merge"
_FOREIGN = {
    "tf_model*.h5": f"TensorFlow weights: {_RESAVE}",
    "*.ckpt.index": f"TensorFlow weights: {_RESAVE}",
    "flax_model*.msgpack": f"Flax weights: {_RESAVE}",
    "*.gguf": f"weights of llama.cpp: {_RESAVE}, or fetch the original",
    "*.onnx": "an exported graph: fetch the model it was made from",
    "consolidated*": "the publisher's own layout: fetch the model's Hugging Face form",
    "adapter_model.*": f"an adapter without its model: {_MERGE}",
}


def is_huggingface(path: Path) -> bool:
    """Return whether a folder holds a Hugging Face model."""
    return path.is_dir() and (path / CONFIG_NAME).is_file()


def foreign_weights(path: Path) -> str:
    """Return the unsupported weights in a folder (or file) with the remedy, if any."""
    found = [
        f"{file.name} is {what}"
        for pattern, what in _FOREIGN.items()
        for file in ([path] if path.is_file() else sorted(path.glob(pattern))[:1])
        if file.match(pattern)
    ]
    return "; ".join(found)


def snapshots(path: Path) -> list[Path]:
    """Return the models in the root of a Hugging Face cache folder (models--<org>--<name>)."""
    if is_huggingface(path):
        return []
    return sorted(each for each in path.glob("snapshots/*") if is_huggingface(each))


def snapshot_folder(path: Path) -> Path:
    """Return the model in the root of a cache folder; any other path is returned unchanged.

    Of several snapshots, the one that refs/main names.
    """
    found = snapshots(path)
    main = path / "refs" / "main"
    if found and main.is_file():
        name = main.read_text(encoding="utf-8", errors="replace").strip()
        found = [each for each in found if each.name == name] or found
    return found[0] if len(found) == 1 else path


def open_huggingface(path: Path) -> CheckpointReader:
    """Return the index of a Hugging Face folder.

    Raises:
        CheckpointMismatchError: config.json or the weights are missing, damaged or inconsistent.
    """
    config = json_file(path / CONFIG_NAME)
    files = _weight_files(path)
    tensors: dict[str, StoredTensor] = {}
    home: dict[str, Path] = {}
    problems: list[str] = []
    for file in files:
        try:
            found = index_tensors(file)
        except CheckpointMismatchError as error:
            problems += error.problems
            continue
        problems += [
            f"tensor {key} is in both {home[key].name} and {file.name} under {path}"
            for key in found
            if key in tensors
        ]
        tensors |= found
        home |= dict.fromkeys(found, file)
    refuse(listed(problems))
    return CheckpointReader(
        format="huggingface",
        path=path,
        config=config,
        tensors={key: (tensor,) for key, tensor in tensors.items()},
        files=(path / CONFIG_NAME, *files),
        tokenizer=_tokenizer_files(path),
    )


def open_configuration(path: Path) -> CheckpointReader | None:
    """Return the index of a folder that holds a configuration and no weights; else None."""
    if not is_huggingface(path) or foreign_weights(path):
        return None
    if any(next(path.glob(f"*{suffix}*"), None) for suffix in (".safetensors", ".bin")):
        return None
    return CheckpointReader(
        format="huggingface",
        path=path,
        config=json_file(path / CONFIG_NAME),
        tensors={},
        files=(path / CONFIG_NAME,),
        tokenizer=_tokenizer_files(path),
        remarks=("the folder holds no weights: what is said of them follows from config.json",),
    )


def _weight_files(path: Path) -> list[Path]:
    for single, index, pattern in _WEIGHTS:
        if (path / single).is_file():
            return [path / single]
        if (path / index).is_file():
            return _indexed_files(path / index)
        # A named pipe would keep its reader waiting.
        shards = sorted(each for each in path.glob(pattern) if each.is_file())
        if shards:
            return shards
    raise CheckpointMismatchError(
        f"{path} has a {CONFIG_NAME} but no weights; expected one of "
        "model.safetensors, pytorch_model.bin, or either's index with its shards"
        + (f" ({foreign})" if (foreign := foreign_weights(path)) else "")
    )


def _indexed_files(index: Path) -> list[Path]:
    names = json_file(index).get("weight_map")
    if not isinstance(names, dict):
        raise CheckpointMismatchError(f"{index} has no weight_map")
    shards = sorted({str(name) for name in names.values()})
    unsafe = [name for name in shards if Path(name).name != name]
    if unsafe:
        raise CheckpointMismatchError(f"{index} is refused: it names {unsafe[0]!r}, a path")
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointMismatchError(
            f"{index.name} names {len(shards)} shards; missing under {index.parent}: "
            + ", ".join(missing)
        )
    return [index.parent / name for name in shards]


def index_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors or torch file by name.

    Raises:
        CheckpointMismatchError: The file is damaged or unsafe.
    """
    if path.suffix == ".safetensors":
        return index_safetensors(path)
    tree = read_torch_file(path)
    if isinstance(tree, Mapping) and isinstance(tree.get("state_dict"), Mapping):
        tree = tree["state_dict"]
    return flatten(tree)


def index_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name.

    Raises:
        CheckpointMismatchError: The header is damaged or disagrees with the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(_GIT_LFS)) == _GIT_LFS:
            raise CheckpointMismatchError(
                f"{path} is a Git LFS pointer and not the weights: fetch them with git lfs pull"
            )
        file.seek(0)
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise truncated(path, f"its header would have {length} bytes, the file has {size}")
        header = json_table(file.read(length), f"{path}: its header")
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        try:
            found = {key: _entry(path, key, e, 8 + length, size) for key, e in entries.items()}
        except CheckpointMismatchError:
            raise
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise truncated(path, f"its header is not a table of tensors: {error}") from error
    _check_cover(path, found, 8 + length, size)
    return found


def _check_cover(path: Path, tensors: Mapping[str, StoredTensor], begin: int, size: int) -> None:
    """Check that the tensors fill the file from `begin` on: no bytes lost or added.

    Raises:
        CheckpointMismatchError: The tensors leave a gap or a rest, or overlap.
    """
    end = begin
    for key, tensor in sorted(
        tensors.items(), key=lambda item: (item[1].offset, item[1].span_bytes)
    ):
        if tensor.offset != end:
            raise truncated(path, f"tensor {key} begins at byte {tensor.offset}, expected {end}")
        end += tensor.span_bytes
    if end != size:
        raise truncated(path, f"its tensors end at byte {end}, the file at {size}")


def _entry(path: Path, key: str, entry: Mapping[str, Any], base: int, size: int) -> StoredTensor:
    kind = str(entry["dtype"])
    if kind not in _SAFETENSORS_TYPES:
        raise CheckpointMismatchError(
            f"{path}: tensor {key} is stored as {kind}; known types: "
            f"{', '.join(_SAFETENSORS_TYPES)} (convert the unquantised checkpoint)"
        )
    begin, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(n) for n in entry["shape"])
    tensor = StoredTensor(path, base + begin, _SAFETENSORS_TYPES[kind], shape)
    if begin < 0 or any(n < 0 for n in shape) or end - begin != tensor.span_bytes:
        raise CheckpointMismatchError(
            f"{path}: tensor {key} of shape {list(shape)} and type {kind} "
            f"({SOURCE_TYPES[tensor.dtype][0]} bytes a value) cannot take {end - begin} bytes"
        )
    if base + end > size:
        raise truncated(path, f"tensor {key} ends at byte {base + end} of {size}")
    return tensor


def _tokenizer_files(path: Path) -> tuple[TokenizerFile, ...]:
    found: dict[str, TokenizerFile] = {}
    for name, target in HUGGINGFACE_FILES.items():
        if (path / name).is_file() and target not in found:
            found[target] = TokenizerFile(target, path / name)
    return tuple(found.values())
