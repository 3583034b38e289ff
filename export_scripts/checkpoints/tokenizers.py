"""A checkpoint's tokenizer files for the FT folder, and their special tokens.

No tokenizer library is needed: a byte-pair vocabulary is JSON, a WordPiece one lines of text, and a
SentencePiece model a protocol buffer.
"""

import fnmatch
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from export_scripts.checkpoints.base import Files, Region, json_file, read_small
from export_scripts.checkpoints.containers import Container
from export_scripts.sentencepiece_model import read_sentencepiece
from foundations.errors import CheckpointMismatchError, refuse
from foundations.files.json_content import Table, is_count

_MAX_ID = (1 << 32) - 1  # the tokenizers library's limit

_GENERATION = "generation_config.json"
_END_OF_TEXT = "<|endoftext|>"
# NeMo's relative paths start from the folder in which its run was launched. They are searched from
# the working directory, the checkpoint's folder, and as many parents of that.
_ANCESTORS_SEARCHED = 4

# Files of a Hugging Face folder to copy -> their names in the FT folder. Of several with the same
# name there, the last is copied.
_HUGGINGFACE_FILES: Mapping[str, str] = {
    "sentencepiece.bpe.model": "tokenizer.model",
    "spiece.model": "tokenizer.model",
} | {
    name: name
    for name in (
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "generation_config.json",
        "chat_template.jinja",
    )
}  # fmt: skip
_TEMPLATES = "additional_chat_templates/*.jinja"


def huggingface_files(members: Files) -> Files:
    """Return a Hugging Face folder's files to copy, by their names in the FT folder.

    `members` are the files of the folder, by name.
    """
    found = {
        ours: members[theirs] for theirs, ours in _HUGGINGFACE_FILES.items() if theirs in members
    }
    templates = {name: members[name] for name in fnmatch.filter(members, _TEMPLATES)}
    return found | templates


def folder_members(folder: Path) -> Files:
    """Return the files of a folder, chat templates in its subfolder included, by relative name."""
    return {
        str(entry.relative_to(folder)): Region(entry)
        for pattern in ("*", _TEMPLATES)
        for entry in sorted(folder.glob(pattern))
        if entry.is_file()
    }


@dataclass(frozen=True)
class GeneratedFile(Region):
    """A tokenizer file whose `content` was made from the file at `path`."""

    content: bytes = b""

    def open(self) -> io.BufferedReader:
        """Return the content as a seekable stream."""
        return io.BufferedReader(io.BytesIO(self.content))


@dataclass(frozen=True)
class SpecialIds:
    """IDs of special tokens; None for a token that the tokenizer lacks."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None


def special_ids(files: Files) -> SpecialIds:
    """Return the special IDs that tokenizer files state; else those of generation_config.json.

    `files` are by their names in the FT folder.

    Raises:
        CheckpointMismatchError: A tokenizer file cannot be read.
    """
    found = _ids_of_tokenizer(files)
    if found.eos is not None or _GENERATION not in files:
        return found
    stated = json_file(files[_GENERATION])
    ids = (stated.get(f"{name}_token_id") for name in ("bos", "eos", "pad"))
    firsts = (token[0] if isinstance(token, list) and token else token for token in ids)
    return SpecialIds(*(token if is_count(token) else None for token in firsts))


def _ids_of_tokenizer(files: Files) -> SpecialIds:
    if "tokenizer.model" in files:
        trainer = sentencepiece_model(files["tokenizer.model"]).trainer_spec
        stated = (trainer.bos_id, trainer.eos_id, trainer.pad_id)
        return SpecialIds(*(token if token >= 0 else None for token in stated))
    if "vocab.json" in files:
        token = json_file(files["vocab.json"]).get(_END_OF_TEXT)
        return SpecialIds(token, token) if isinstance(token, int) else SpecialIds()
    if "vocab.txt" in files:
        lines = read_small(files["vocab.txt"]).decode(errors="replace").split("\n")
        ids = {line.rstrip("\r"): i for i, line in reversed(list(enumerate(lines)))}
        return SpecialIds(ids.get("[CLS]"), ids.get("[SEP]"), ids.get("[PAD]"))
    if "tokenizer.json" in files and "tokenizer_config.json" in files:
        return _added_ids(files["tokenizer.json"], files["tokenizer_config.json"])
    return SpecialIds()


def _added_ids(tokenizer: Region, settings: Region) -> SpecialIds:
    """Return the IDs of the tokens that a Hugging Face tokenizer's settings name."""
    added = json_file(tokenizer).get("added_tokens")
    ids = {
        item["content"]: item["id"]
        for item in (added if isinstance(added, list) else [])
        if isinstance(item, dict)
        and isinstance(item.get("id"), int)
        and isinstance(item.get("content"), str)
    }
    for name, token in ids.items():
        if not 0 <= token <= _MAX_ID:
            raise CheckpointMismatchError(
                f"{tokenizer.path}: added token {name[:40]!r} has the id {token}, which the "
                f"tokenizers library refuses; ids are 0 to {_MAX_ID}"
            )
    names = json_file(settings)

    def known(key: str) -> int | None:
        token = names.get(key)
        name = token.get("content") if isinstance(token, dict) else token
        return ids.get(name) if isinstance(name, str) else None

    found = SpecialIds(known("bos_token"), known("eos_token"), known("pad_token"))
    return SpecialIds() if found.bos is None and found.eos is None else found


def sentencepiece_model(file: Region) -> Any:
    """Return the content of a tokenizer.model.

    Raises:
        CheckpointMismatchError: The content is something else.
    """
    try:
        return read_sentencepiece(read_small(file))
    except ValueError as error:
        raise CheckpointMismatchError(f"{file}: {error}") from error


def check_outside_files(files: Files, checkpoint: Path) -> None:
    """Check the files outside of a checkpoint that would be copied with its model.

    A checkpoint can name or link to any file of the user's. A file that is not a tokenizer's could
    be a secret, which must not reach those who get the model.

    Raises:
        CheckpointMismatchError: Such a file is not a tokenizer's.
    """
    folders = [checkpoint.resolve()]
    cache = folders[0].parent.parent
    # A snapshot in a Hugging Face cache links to the cache's blobs.
    if folders[0].parent.name == "snapshots" and cache.name.startswith("models--"):
        folders.append(cache / "blobs")
    problems = [
        f"{file.path} is refused: it is outside of the checkpoint and not a tokenizer's {name}; if "
        "you trust it, copy it into the checkpoint"
        for name, file in files.items()
        # Only a member of an archive has a name.
        if not file.name
        and not any(file.path.resolve().is_relative_to(folder) for folder in folders)
        and not _is_tokenizer(name, files)
    ]
    refuse(problems)


def _is_tokenizer(name: str, files: Files) -> bool:
    """Return whether a file's content is the tokenizer's that its name says."""
    try:
        data = read_small(files[name])
        if name == "tokenizer.model":
            model = read_sentencepiece(data)
            return bool(model.pieces) and model.HasField("trainer_spec")
        if name == "vocab.txt":
            return {b"[UNK]", b"[CLS]", b"[SEP]"} <= set(data.split())
        vocabulary = json_file(files["vocab.json"])
        if not vocabulary or not all(type(token_id) is int for token_id in vocabulary.values()):
            return False
        if name == "merges.txt":
            pairs = [line.split(" ") for line in data.decode().splitlines()[1:] if line]
            return all(len(pair) == 2 and "".join(pair) in vocabulary for pair in pairs)
    except (ValueError, KeyError):
        return False
    return name == "vocab.json"


def is_list(file: Region) -> bool:
    """Return whether a JSON file holds a list, as tiktoken's vocabularies do."""
    with file.open() as stream:
        return stream.read(64).lstrip().startswith(b"[")


def given_files(vocab_path: Path | None, merges_path: Path | None) -> Files:
    """Return the tokenizer files that the user named, by their names in the FT folder.

    Raises:
        ValueError: A path does not exist.
    """
    files = {}
    for path, stem in ((vocab_path, "vocab"), (merges_path, "merges")):
        if path is None:
            continue
        if not path.is_file():
            raise ValueError(f"tokenizer file {path} does not exist")
        # A tokenizer.json may have another name, such as 20B_tokenizer.json.
        is_table = path.suffix == ".json" and not is_list(Region(path))
        is_whole = is_table and isinstance(json_file(path).get("model"), dict)
        stem = "tokenizer" if path.suffix == ".model" or is_whole else stem
        files[f"{stem}{path.suffix}"] = Region(path)
    return files


def nemo_files(container: Container, config: Table) -> Files:
    """Return the tokenizer files that a NeMo 1.x configuration names, in the archive or outside.

    Raises:
        CheckpointMismatchError: An archive lacks a file that it names, or several match the name.
    """
    settings = config.get("tokenizer")
    if not isinstance(settings, Mapping):
        return {}
    kinds = (
        ("model", "tokenizer", "*.model"),
        ("vocab_file", "vocab", "*vocab*"),
        ("merge_file", "merges", "*merge*.txt"),
    )
    return {
        stem + PurePosixPath(region.name or region.path).suffix: region
        for key, stem, pattern in kinds
        if (region := _tokenizer_region(container, settings.get(key), pattern))
    }


def _tokenizer_region(container: Container, value: Any, pattern: str) -> Region | None:
    """Return a tokenizer file in the root of the checkpoint, else at the configured path."""
    if not isinstance(value, str) or not value:
        return None
    inside = value.startswith(("nemo:", "/artifacts/"))
    wanted = f"*{PurePosixPath(value.removeprefix('nemo:')).name}" if inside else pattern
    root = [name for name in container.members if "/" not in name]
    hits = sorted(name for name in root if fnmatch.fnmatchcase(name, wanted))
    if len(hits) > 1:
        raise CheckpointMismatchError(
            f"{container.path} has several files for tokenizer {value!r}: {', '.join(hits)}"
        )
    if hits:
        return container.members[hits[0]]
    # The folder of a run that began from an archive names files of the archive but lacks them.
    if inside and container.path.is_file():
        raise CheckpointMismatchError(f"{container.path} lacks its tokenizer file {value!r}")
    above = list(container.path.resolve().parents)[:_ANCESTORS_SEARCHED]
    files = (base / value for base in (Path(), container.path, *above))
    return next((Region(file) for file in files if file.is_file()), None)
