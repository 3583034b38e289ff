"""Hugging Face folders: config.json, safetensors or torch .bin files, single or indexed."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from export_scripts.checkpoints.base import (
    CheckpointReader,
    StoredTensor,
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
    is_sharded,
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
from foundations.files.json_content import Fields, Table

_MOST_NAME = 100  # characters of a file's name in messages

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
    ("model.bin", "model.bin.index.json", "model*.bin"),  # of torchtune
)

# Ends of the names of files that hold a whole model, as accelerate and Lightning save them.
_LONE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")

# Keys of the model in a trainer's state, from the outside: of Composer, and of many others.
_MODEL_KEYS = ("state", "model_state_dict", "model")

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
    "lit_model.pth": "LitGPT's own form: `litgpt convert_from_litgpt FOLDER OUT`, and name "
    "OUT/model.pth with the model's config.json",
    "checkpoint_metadata.json": "nanotron's own form: its examples/llama/convert_nanotron_to_hf.py "
    "--checkpoint_path=FOLDER --save_path=OUT makes a Hugging Face folder",
    "adapter_model.*": f"an adapter without its model: {_MERGE}",
}


def is_huggingface(path: Path) -> bool:
    """Return whether a folder holds a Hugging Face model."""
    return path.is_dir() and is_configuration(path / CONFIG_NAME)


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
        name = read_name(main)
        found = [each for each in found if each.name == name] or found
    return found[0] if len(found) == 1 else path


def is_trained(path: Path) -> bool:
    """Return whether a path looks like a model in a trainer's files, without its settings."""
    if path.is_file():
        is_lone = path.suffix in _LONE and path.name not in FILE_NAMES
        return is_lone and not foreign_weights(path) and _may_hold_tensors(path)
    return is_sharded(path) or _has_weights(path)


def _may_hold_tensors(path: Path) -> bool:
    """Return whether a file begins as torch.save's archives and pickles do, or as safetensors."""
    with path.open("rb") as file:
        begin = file.read(9)
    return begin.startswith((b"PK", b"\x80")) or begin[8:] == b"{"


def _has_weights(path: Path) -> bool:
    return any(
        each.is_file() and not is_rank_file(each)
        for *_, pattern in _WEIGHTS
        for each in path.glob(pattern)
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
    """Return the index of what a Hugging Face folder holds, and the problems of its files.

    The path is a file of weights, or their folder, whose config.json may lie in `settings`.

    Raises:
        CheckpointMismatchError: config.json is missing or damaged, or there are no weights.
        UnreadTypeError: Some are of a type that is not read; all problems are listed.
    """
    configuration = open_configuration(settings or path)
    if not path.is_file() and not _has_weights(path) and sharded_folders(path):
        return in_huggingface_names(with_sharded_weights(configuration, path)), []
    files, index, facts, problems = _weight_files(path)
    tensors: dict[str, StoredTensor] = {}
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
    tensors = without_wrappers(_with_aliases(tensors, facts))
    if settings is not None:
        tensors = without_prefixes(tensors, path)
        index = without_prefixes(index, path)
    reader = dataclasses.replace(
        configuration,
        path=path,
        described_in=settings,
        tensors={key: tensor.pieces for key, tensor in tensors.items()},
        files=(*configuration.files, *files),
        remarks=(*configuration.remarks, *_left_out(path)),
    )
    problems = listed(problems) or listed(_misplaced(path, index, tensors))
    return reader if problems else in_huggingface_names(reader), problems


def _left_out(path: Path) -> list[str]:
    """Return a remark on an adapter next to a model's weights, which may hold it already."""
    return [
        f"{each} lies next to the model's weights and is left out: to merge it, name it as a LoRA "
        "checkpoint"
        for each in sorted(path.glob("adapter_model.*"))
    ]


def open_sharded(path: Path, *, settings: Path | None = None) -> CheckpointReader:
    """Return the index of a model in a trainer's distributed files.

    Its settings are those of a config.json, or of one in a folder, else of one that lies near by.

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
            "where it lies (--model-config, convert.model_config)"
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
    """Return the files of weights, the index (a tensor's name -> its file's), and its metadata.

    The last are the problems of the index, which may name files that are not there.
    """
    if path.is_file():
        return [path], {}, {}, []
    for single, index, pattern in _WEIGHTS:
        if (path / single).is_file():
            return [path / single], {}, {}, []
        if (path / index).is_file():
            named, facts, problems = _indexed_files(path / index)
            present = [path / name for name in sorted(set(named.values()))]
            return present, without_wrappers(named), facts, problems
        # A named pipe would keep its reader waiting.
        if shards := sorted(each for each in path.glob(pattern) if each.is_file()):
            return shards, {}, {}, []
    raise CheckpointMismatchError(
        f"{path} has a {CONFIG_NAME} but no weights; expected one of "
        "model.safetensors, pytorch_model.bin, or either's index with its shards"
        + (f" ({foreign})" if (foreign := foreign_weights(path)) else "")
    )


def _indexed_files(index: Path) -> tuple[dict[str, str], Fields, list[str]]:
    table = json_file(index)
    named, facts = table.get("weight_map"), table.get("metadata")
    if not isinstance(named, dict) or not named:
        raise CheckpointMismatchError(f"{index} has no weight_map of tensors; copy it again")
    present = {each.name for each in index.parent.iterdir() if each.is_file()}
    there = {key: name for key, name in named.items() if isinstance(name, str) and name in present}
    missing = {f"{named[key]!r:.{_MOST_NAME}}" for key in named.keys() - there.keys()}
    problems = [
        f"{index}: weight_map names what is not a file next to it: "
        f"{first_names(sorted(missing))}; copy these files there, or the index that belongs to "
        "those that are there"
    ]
    return there, facts if isinstance(facts, dict) else {}, problems if missing else []


def _with_aliases(tensors: dict[str, StoredTensor], facts: Table) -> dict[str, StoredTensor]:
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
        return _with_aliases(*read_safetensors(path))
    tree = read_torch_file(path)
    for name in _MODEL_KEYS:  # of a trainer's state
        inner = tree.get(name) if isinstance(tree, Mapping) else None
        tree = inner if isinstance(inner, Mapping) else tree
    if not isinstance(tree, Mapping) or "_modules" in tree:
        raise CheckpointMismatchError(
            f"{path} holds no tensors by name, as a whole module does not: save its state_dict() "
            "in its place"
        )
    return flatten(tree)
