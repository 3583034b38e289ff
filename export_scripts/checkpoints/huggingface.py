"""Hugging Face folders: config.json, and safetensors or torch .bin files, single or indexed."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from export_scripts.checkpoints.base import (
    CheckpointReader,
    StoredTensor,
    StoredTensors,
    json_file,
    read_name,
)
from export_scripts.checkpoints.distributed import without_prefixes
from export_scripts.checkpoints.megatron import FILE_NAMES
from export_scripts.checkpoints.partitioned import flatten, without_wrappers
from export_scripts.checkpoints.pt_archive import read_torch_file
from export_scripts.checkpoints.rank_files import is_rank_file
from export_scripts.checkpoints.safetensors_file import read_safetensors
from export_scripts.checkpoints.sharded_huggingface import (
    CONFIG_NAME,
    in_huggingface_names,
    is_configuration,
    settings_folder,
    sharded_folders,
    with_sharded_weights,
)
from export_scripts.checkpoints.tokenizers import folder_members, huggingface_files
from foundations.errors import (
    CheckpointMismatchError,
    UnreadTypeError,
    first_names,
    listed,
    refuse,
)
from foundations.files.json_content import Fields, Table, nested
from foundations.files.yaml_content import read_table

_MAX_NAME = 100  # characters of a file name in messages

# Suffixes of the names of embeddings and heads, which a model may tie.
TIED_TABLES = (
    "embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight",
    "shared.weight", "lm_head.weight", "embed_out.weight", "predictions.decoder.weight",
    "predictions.decoder.bias",
)  # fmt: skip

# (single file, pattern of shards without an index), in order of preference.
_WEIGHTS = (
    ("model.safetensors", "model*.safetensors"),
    ("pytorch_model.bin", "pytorch_model*.bin"),
    ("model.bin", "model*.bin"),  # torchtune
    ("lit_model.pth", "lit_model.pth"),  # LitGPT
)

# Suffixes of a file that holds a whole model, as accelerate and Lightning save it.
_LONE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")

# Keys that lead to the model in a trainer's state, outermost first; Composer has the first.
_MODEL_KEYS = ("state", "model_state_dict", "model")


def is_huggingface(path: Path) -> bool:
    """Return whether a folder holds a Hugging Face model."""
    return path.is_dir() and is_configuration(path / CONFIG_NAME)


def foreign_weights(path: Path) -> str:
    """Return the unsupported weights in a folder, or in a file, with the remedy in brackets."""
    found = "; ".join(
        f"{file.name} is {what}"
        for pattern, what in read_table(Path(__file__).with_name("foreign_weights.yaml")).items()
        for file in ([path] if path.is_file() else sorted(path.glob(pattern))[:1])
        if file.match(pattern)
    )
    return f" ({found})" if found else ""


def snapshots(path: Path) -> list[Path]:
    """Return the models in the root of a Hugging Face cache folder (models--<org>--<name>)."""
    if is_huggingface(path):
        return []
    return sorted(folder for folder in path.glob("snapshots/*") if is_huggingface(folder))


def snapshot_folder(path: Path) -> Path:
    """Return the snapshot in the root of a cache folder; any other path is returned unchanged.

    If there are several, refs/main names the one to take.
    """
    found = snapshots(path)
    main = path / "refs" / "main"
    if found and main.is_file():
        name = read_name(main)
        found = [folder for folder in found if folder.name == name] or found
    return found[0] if len(found) == 1 else path


def is_trainer_checkpoint(path: Path) -> bool:
    """Return whether a path looks like a trainer's checkpoint without a config.json."""
    if path.is_file():
        is_lone = path.suffix in _LONE and path.name not in FILE_NAMES
        return is_lone and not foreign_weights(path) and _may_hold_tensors(path)
    return bool(sharded_folders(path)) or _has_weights(path)


def _may_hold_tensors(path: Path) -> bool:
    """Return whether a file begins like a torch archive, a pickle or a safetensors file."""
    with path.open("rb") as file:
        begin = file.read(9)
    return begin.startswith((b"PK", b"\x80")) or begin[8:] == b"{"


def _has_weights(path: Path) -> bool:
    return any(
        file.is_file() and not is_rank_file(file)
        for _, pattern in _WEIGHTS
        for file in path.glob(pattern)
    )


def open_huggingface(path: Path) -> CheckpointReader:
    """Return the index of a Hugging Face folder.

    Raises:
        CheckpointMismatchError: config.json or the weights are missing, damaged or inconsistent.
    """
    reader, problems = index_huggingface(path)
    refuse(problems)
    return reader


def index_huggingface(
    path: Path, settings: Path | None = None
) -> tuple[CheckpointReader, list[str]]:
    """Return the index of a Hugging Face folder, and the problems of its files.

    `path` is the folder of the weights, or a file of weights; `settings` is the folder of
    config.json if that is another.

    Raises:
        CheckpointMismatchError: config.json is missing or damaged, or there are no weights.
        UnreadTypeError: Only unsupported types keep the files from being read; all problems are
            listed.
    """
    configuration = open_configuration(settings or path)
    if not path.is_file() and not _has_weights(path) and sharded_folders(path):
        return in_huggingface_names(with_sharded_weights(configuration, path)), []
    files, index, facts, problems = _weight_files(path)
    tensors: StoredTensors = {}
    are_read = True
    for file in files:
        try:
            found = index_tensors(file)
        except CheckpointMismatchError as error:
            problems += error.problems
            are_read = are_read and not isinstance(error, UnreadTypeError)
            continue
        problems += [
            f"tensor {key} is in both {tensors[key].path.name} and {file.name} under {path}"
            for key in found
            if key in tensors
        ]
        tensors |= found
    if not are_read:
        raise UnreadTypeError(listed(problems))
    stored_names = frozenset(tensors)
    tensors = without_wrappers(_with_aliases(tensors, facts))
    if settings is not None:
        tensors = without_prefixes(tensors, path)
        index = without_prefixes(index, path)
    # The model's weights may include them already.
    adapters = [
        f"{file} is next to the model's weights and left out: to merge it, name it in --lora "
        "(convert.lora_checkpoints)"
        for file in sorted(path.glob("adapter_model.*"))
    ]
    reader = dataclasses.replace(
        configuration,
        path=path,
        settings_dir=settings,
        tensors={key: tensor.pieces for key, tensor in tensors.items()},
        files=(*configuration.files, *files),
        remarks=(*configuration.remarks, *adapters),
        stored_names=stored_names,
    )
    problems = listed(problems) or listed(_misplaced(path, index, tensors))
    return reader if problems else in_huggingface_names(reader), problems


def open_sharded(path: Path, *, settings: Path | None = None) -> CheckpointReader:
    """Return the index of a trainer's checkpoint.

    `settings` is a config.json or its folder; None looks for one near the weights.

    Raises:
        CheckpointMismatchError: config.json or the weights are missing, damaged or inconsistent.
    """
    folder = path.parent if path.is_file() else path
    if settings is None:
        settings = settings_folder(folder)
    elif settings.name == CONFIG_NAME:
        settings = settings.parent
    if settings is None:
        raise CheckpointMismatchError(
            f"{path} does not state its model's sizes: copy the {CONFIG_NAME} of the Hugging Face "
            f"model that training began with (and its tokenizer's files) into {folder}, or name it "
            "in --model-config (convert.model_config)"
        )
    reader, problems = index_huggingface(path, settings)
    refuse(problems)
    return reader


def open_configuration(path: Path) -> CheckpointReader:
    """Return the index of a folder without its weights."""
    file = path / CONFIG_NAME
    tokenizer = huggingface_files(folder_members(path))
    return CheckpointReader("huggingface", path, json_file(file), {}, (file,), tokenizer=tokenizer)


def _weight_files(
    path: Path,
) -> tuple[list[Path], Mapping[str, str], Table, list[str]]:
    """Return the files of weights, the index (tensor name -> file name), its metadata and problems.

    The problems are files that the index names but that do not exist.
    """
    if path.is_file():
        return [path], {}, {}, []
    for single, pattern in _WEIGHTS:
        if (path / single).is_file():
            return [path / single], {}, {}, []
        if (index := path / f"{single}.index.json").is_file():
            named, facts, problems = _indexed_files(index)
            present = [path / name for name in sorted(set(named.values()))]
            return present, without_wrappers(named), facts, problems
        # Reading a named pipe would block.
        if shards := sorted(file for file in path.glob(pattern) if file.is_file()):
            return shards, {}, {}, []
    raise CheckpointMismatchError(
        f"{path} has a {CONFIG_NAME} but no weights; expected one of "
        "model.safetensors, pytorch_model.bin, or either's index with its shards"
        + foreign_weights(path)
    )


def _indexed_files(index: Path) -> tuple[dict[str, str], Fields, list[str]]:
    table = json_file(index)
    named, facts = table.get("weight_map"), table.get("metadata")
    if not isinstance(named, dict) or not named:
        raise CheckpointMismatchError(f"{index} has no weight_map of tensors; copy it again")
    present = {file.name for file in index.parent.iterdir() if file.is_file()}
    there = {key: name for key, name in named.items() if isinstance(name, str) and name in present}
    missing = {f"{named[key]!r:.{_MAX_NAME}}" for key in named.keys() - there.keys()}
    problems = [
        f"{index}: weight_map names what is not a file next to it: "
        f"{first_names(sorted(missing))}; copy these files there, or the index of the existing "
        "files"
    ]
    return there, facts if isinstance(facts, dict) else {}, problems if missing else []


def _with_aliases(tensors: StoredTensors, facts: Table) -> StoredTensors:
    """Return tensors together with aliases, which are stored only under another tensor's name.

    `facts` is the metadata, which also maps omitted names to stored ones: safetensors.torch,
    save_model; huggingface_hub, serialization/_torch.py.
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
    """Return a problem for each tensor that is in another file than the index says, or in none.

    Tensors that the index does not list are accepted: transformers reads everything in its files.
    So are tied tensors that no file holds, which safetensors' converter lists.
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


def index_tensors(path: Path) -> StoredTensors:
    """Return the tensors of a safetensors or torch file by name.

    Raises:
        CheckpointMismatchError: The file is damaged, unsafe or inconsistent with its header.
    """
    if path.suffix == ".safetensors":
        return _with_aliases(*read_safetensors(path))
    tree = read_torch_file(path)
    for name in _MODEL_KEYS:
        inner = nested(tree, name)
        tree = inner if isinstance(inner, Mapping) else tree
    if not isinstance(tree, Mapping) or "_modules" in tree:
        raise CheckpointMismatchError(
            f"{path} holds no tensors by name, as a whole module does not: save its state_dict() "
            "in its place"
        )
    return flatten(tree)
