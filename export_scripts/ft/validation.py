"""Comparison of an FT folder with its config.ini, its family and its manifest."""

import concurrent.futures
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISREG

from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.spec import FTTensor, ModelFamily
from export_scripts.ft.config_ini import read_config
from export_scripts.ft.layout import EXTRA_FILES, expected_files, manifest_path
from foundations.errors import CheckpointMismatchError, Reasons
from foundations.files.checksum import checksum_of
from foundations.files.json_content import Fields, json_object
from foundations.suggest import matches_any

# Files whose checksums are computed at once: some are read from disk while others are summed.
_READERS = 4


def validate_directory(ft_dir: Path, *, checksums: bool = True) -> list[str]:
    """Return every difference between an FT folder and its description.

    config.ini, the set of weight files and their sizes are checked, and, if there is a manifest,
    the files in it (with `checksums`, also their checksums).
    """
    if not ft_dir.is_dir():
        return [f"{ft_dir} is not a folder; expected a converted checkpoint such as <dir>/2-gpu"]
    try:
        family, config = read_config(ft_dir)
    except CheckpointMismatchError as error:
        return error.problems
    problems = _compare_files(ft_dir, family, config)
    for name, problem in manifest_problems(ft_dir, checksums=checksums).items():
        problems.setdefault(name, problem)  # one for each file
    return list(problems.values())


def open_directory(ft_dir: Path) -> tuple[ModelFamily, FTConfig, dict[str, FTTensor]]:
    """Return the family and the config of a folder, and the tensors that it holds, by name.

    Raises:
        CheckpointMismatchError: The set of files, or a size, differs from config.ini.
    """
    if problems := validate_directory(ft_dir, checksums=False):
        raise CheckpointMismatchError([f"{ft_dir} cannot be loaded:", *problems])
    family, config = read_config(ft_dir)
    tensors = {
        tensor.name: tensor
        for _, _, tensor in family.expand(config)
        if not tensor.optional or (ft_dir / tensor.file_name()).exists()
    }
    return family, config, tensors


def _compare_files(ft_dir: Path, family: ModelFamily, config: FTConfig) -> Reasons:
    """Return file name -> problem; the key of a problem of the whole folder is its path."""
    try:
        expected = expected_files(family, config)
    except ValueError as error:
        return {str(ft_dir): str(error)}
    found = {entry.name for entry in ft_dir.iterdir()}
    for _, _, tensor in family.expand(config):
        if tensor.optional and (name := tensor.file_name()) in found:
            expected[name] = tensor.file_bytes(1, config.weight_data_type)
    kind = f"{family.name} folder of {config.tensor_para_size} ranks"
    tolerated = (*EXTRA_FILES, *family.unread)
    return _size_problems(ft_dir, expected) | {
        name: f"{name} is not expected in a {kind}"
        for name in sorted(found)
        if name not in expected and not matches_any(name, tolerated)
    }


def _size_problems(folder: Path, sizes: Mapping[str, int]) -> Reasons:
    """Return file name -> problem of each file with another size, or missing."""
    problems = {}
    for name, size in sizes.items():
        try:
            found = (folder / name).stat()
        except FileNotFoundError:
            problems[name] = f"{name} is missing (expected {size} bytes)"
            continue
        if not S_ISREG(found.st_mode):
            problems[name] = f"{name} is not a regular file"
        elif found.st_size != size:
            problems[name] = f"{name} has {found.st_size} bytes, expected {size}"
    return problems


def read_manifest(folder: Path) -> Fields:
    """Return the manifest of a converted folder, which `conversion.convert` writes.

    Without a manifest, `files` and `source` are empty.

    Raises:
        CheckpointMismatchError: The manifest cannot be read.
    """
    path = manifest_path(folder)
    if not path.exists():
        return {"files": {}, "source": {}}
    try:
        table = json_object(path.read_bytes(), path)
        records = table["files"].values()
        if any(int(each["size_bytes"]) < 0 or int(each["crc32"], 16) < 0 for each in records):
            raise ValueError("sizes and checksums below 0")
        table["source"] = source = dict(table.get("source", {}))
        source["settings"] = dict(source.get("settings", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointMismatchError(
            f"{path} is not a readable manifest ({error!r}); delete it, or convert again with "
            "--overwrite"
        ) from error
    return table


def manifest_problems(folder: Path, *, checksums: bool) -> Reasons:
    """Return file name -> problem; the key of a problem of the manifest is its path."""
    try:
        records = read_manifest(folder)["files"]
    except CheckpointMismatchError as error:
        return {str(manifest_path(folder)): str(error)}
    problems = _size_problems(folder, {name: each["size_bytes"] for name, each in records.items()})
    if checksums:
        sound = [name for name in records if name not in problems]
        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            found = pool.map(checksum_of, (folder / name for name in sound))
            problems |= {
                name: f"{name} differs from the checksum in the manifest (crc32)"
                for name, actual in zip(sound, found, strict=True)
                if actual != records[name]["crc32"]
            }
    return problems
