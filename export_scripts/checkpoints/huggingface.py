"""Hugging Face folders: config.json, safetensors or torch .bin files, single or indexed."""

import dataclasses
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from export_scripts.checkpoints.base import (
    CheckpointReader,
    Region,
    StoredTensor,
    json_file,
    json_table,
    read_small,
    truncated,
)
from export_scripts.checkpoints.partitioned import flatten, without_wrappers
from export_scripts.checkpoints.pt_archive import read_torch_file
from export_scripts.checkpoints.tokenizers import HUGGINGFACE_FILES
from export_scripts.errors import CheckpointMismatchError, first_names, listed, refuse
from export_scripts.numeric.dtypes import SOURCE_TYPES

CONFIG_NAME = "config.json"

_SAFETENSORS_TYPES = {
    "F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000
_MOST_AXES, _MOST_BYTES = 32, 1 << 62
_MOST_NAME = 100  # characters of a file's name in messages
_GIT_LFS = b"version https://git-lfs"

# Ends of the names of embeddings and heads, which a model may share.
TIED_TABLES = (
    "embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight",
    "shared.weight", "lm_head.weight", "embed_out.weight", "predictions.decoder.weight",
    "predictions.decoder.bias",
)  # fmt: skip

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
    return "; ".join(
        f"{file.name} is {what}"
        for pattern, what in _FOREIGN.items()
        for file in ([path] if path.is_file() else sorted(path.glob(pattern))[:1])
        if file.match(pattern)
    )


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
        name = read_small(main).decode(errors="replace").strip()
        found = [each for each in found if each.name == name] or found
    return found[0] if len(found) == 1 else path


def open_huggingface(path: Path) -> CheckpointReader:
    """Return the index of a Hugging Face folder.

    Raises:
        CheckpointMismatchError: config.json or the weights are missing, damaged or inconsistent.
    """
    configuration = open_configuration(path)
    files, index, facts = _weight_files(path)
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for file in files:
        try:
            found = index_tensors(file)
        except CheckpointMismatchError as error:
            problems += error.problems
            continue
        problems += [
            f"tensor {key} is in both {tensors[key].path.name} and {file.name} under {path}"
            for key in found
            if key in tensors
        ]
        tensors |= found
    tensors = without_wrappers(_with_aliases(tensors, facts))
    refuse(listed(problems or _misplaced(path, index, tensors)))
    pieces = {key: (tensor,) for key, tensor in tensors.items()}
    return dataclasses.replace(configuration, tensors=pieces, files=(path / CONFIG_NAME, *files))


def open_configuration(path: Path) -> CheckpointReader:
    """Return the index of a folder without its weights."""
    file = path / CONFIG_NAME
    tokenizer = {
        target: Region(path / name)
        for name, target in HUGGINGFACE_FILES.items()
        if (path / name).is_file()
    }
    return CheckpointReader("huggingface", path, json_file(file), {}, (file,), tokenizer=tokenizer)


def _weight_files(path: Path) -> tuple[list[Path], Mapping[str, str], Mapping[str, Any]]:
    """Return the files of weights, the index (a tensor's name -> its file's), and its metadata."""
    for single, index, pattern in _WEIGHTS:
        if (path / single).is_file():
            return [path / single], {}, {}
        if (path / index).is_file():
            named, facts = _indexed_files(path / index)
            return [path / name for name in sorted(set(named.values()))], named, facts
        # A named pipe would keep its reader waiting.
        if shards := sorted(each for each in path.glob(pattern) if each.is_file()):
            return shards, {}, {}
    raise CheckpointMismatchError(
        f"{path} has a {CONFIG_NAME} but no weights; expected one of "
        "model.safetensors, pytorch_model.bin, or either's index with its shards"
        + (f" ({foreign})" if (foreign := foreign_weights(path)) else "")
    )


def _indexed_files(index: Path) -> tuple[dict[str, str], dict[str, Any]]:
    table = json_file(index)
    named, facts = table.get("weight_map"), table.get("metadata")
    if not isinstance(named, dict) or not named:
        raise CheckpointMismatchError(f"{index} has no weight_map of tensors; copy it again")
    present = {each.name for each in index.parent.iterdir() if each.is_file()}
    missing = {
        f"{name!r:.{_MOST_NAME}}"
        for name in named.values()
        if not isinstance(name, str) or name not in present
    }
    if missing:
        raise CheckpointMismatchError(
            f"{index}: weight_map names what is not a file next to it: "
            f"{first_names(sorted(missing))}; copy these files there, or the index that belongs to "
            "those that are there"
        )
    return without_wrappers(named), facts if isinstance(facts, dict) else {}


def _with_aliases(
    tensors: dict[str, StoredTensor], facts: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Return tensors with those that are stored under another one's name alone.

    `facts` maps the names that were left out to those that were kept, among other things.
    safetensors.torch, save_model; huggingface_hub, serialization/_torch.py.
    """
    aliases = {
        name: tensors[kept]
        for name, kept in facts.items()
        if isinstance(kept, str) and kept in tensors and name not in tensors
    }
    return tensors | aliases


def _misplaced(
    path: Path, index: Mapping[str, str], tensors: Mapping[str, StoredTensor]
) -> list[str]:
    """Return the tensors that are in another file than the index says, or in none.

    Those that it does not list are read as transformers reads them, which takes all that each of
    its files holds. safetensors' own converter lists tied tensors that it leaves out.
    """
    lost = [key for key in index if key not in tensors and not key.endswith(TIED_TABLES)]
    problems = [
        f"{key} is in {tensors[key].path.name}, and not in {file}"
        for key, file in index.items()
        if key in tensors and tensors[key].path.name != file
    ]
    if lost:
        problems.append(f"no file holds {first_names(lost)}")
    remedy = "its index and its files are of different models: copy all of them again"
    return [f"{path}: {problem}; {remedy}" for problem in problems]


def index_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors or torch file by name.

    Raises:
        CheckpointMismatchError: The file is damaged or unsafe, or its header disagrees with it.
    """
    if path.suffix == ".safetensors":
        return _index_safetensors(path)
    return flatten(read_torch_file(path))


def _index_safetensors(path: Path) -> dict[str, StoredTensor]:
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
        text = file.read(length)
    try:
        header = json_table(text.decode(), f"{path}: its header", is_strict=True)
    except UnicodeDecodeError as error:
        raise truncated(path, "its header is not a text in UTF-8") from error
    facts = header.pop("__metadata__", {})
    problems: list[str] = []
    if not isinstance(facts, dict) or not all(isinstance(each, str) for each in facts.values()):
        problems.append("__metadata__ of its header is not a table of texts")
    found = {
        key: tensor
        for key, entry in header.items()
        if (tensor := _entry(path, key, entry, 8 + length, problems))
    }
    refuse(listed(problems, f"{path}: "))
    _check_cover(path, found, 8 + length, size)
    return _with_aliases(found, facts)


def _check_cover(path: Path, tensors: Mapping[str, StoredTensor], begin: int, size: int) -> None:
    """Check that the tensors fill the file from `begin` on: no bytes lost or added."""
    end = begin
    in_order = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].span_bytes))
    for key, tensor in in_order:
        if tensor.offset != end:
            raise truncated(path, f"tensor {key} begins at byte {tensor.offset}, expected {end}")
        end += tensor.span_bytes
    if end != size:
        raise truncated(path, f"its tensors end at byte {end}, the file at {size}")


def _entry(path: Path, key: str, entry: Any, base: int, problems: list[str]) -> StoredTensor | None:
    """Return the tensor of an entry of the header; `base` is where the tensors begin."""
    kind, shape, offsets = (
        entry.get(name) if isinstance(entry, dict) else None
        for name in ("dtype", "shape", "data_offsets")
    )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        problems.append(
            f"tensor {key} has shape = {shape!r:.100} and data_offsets = {offsets!r:.100}; "
            "expected lists of whole numbers: copy the file again"
        )
        return None
    if not isinstance(kind, str) or kind not in _SAFETENSORS_TYPES:
        problems.append(
            f"tensor {key} is stored as {kind!r:.100}; known types: "
            f"{', '.join(_SAFETENSORS_TYPES)} (convert the unquantised checkpoint)"
        )
        return None
    begin, end = offsets
    tensor = StoredTensor(path, base + begin, _SAFETENSORS_TYPES[kind], tuple(shape))
    if end - begin == tensor.span_bytes:
        return tensor
    problems.append(
        f"tensor {key} of shape {shape!r:.100} and type {kind} ({SOURCE_TYPES[tensor.dtype][0]} "
        f"bytes a value) cannot take {end - begin} bytes: copy the file again"
    )
    return None


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_AXES
        and all(type(size) is int and 0 <= size < _MOST_BYTES for size in value)
    )
