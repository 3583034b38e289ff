"""NeMo checkpoints: a .nemo archive, the folder it unpacks to, or a run's checkpoints folder.

Layout rules: NeMo 1.x, core/connectors/save_restore_connector.py and the checkpoint folders of
its Megatron models.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from export_scripts.checkpoints.base import FileMaps, StoredTensor, TensorIndex, TokenizerFile
from export_scripts.checkpoints.containers import Container, is_tar, open_container
from export_scripts.checkpoints.partitioned import (
    RankName,
    check_ranks,
    count_of,
    flatten,
    join_ranks,
    parse_rank_folder,
)
from export_scripts.checkpoints.torch_archive import Region, read_torch_file
from export_scripts.errors import CheckpointMismatchError

CONFIG_NAME = "model_config.yaml"
WEIGHTS_NAME = "model_weights.ckpt"

_MAX_CONFIG_BYTES = 8 << 20
_STEP = re.compile(r"step=(\d+)")
# Relative tokenizer paths in a run's configuration start from where it was launched: look in the
# working directory, then from the checkpoint's folder upwards.
_ANCESTORS_SEARCHED = 4

_Tree = Mapping[str, Any]


def is_nemo(path: Path) -> bool:
    """Return whether a path looks like a NeMo archive, unpacked folder or checkpoints folder."""
    if path.is_file():
        return is_tar(path)
    if not path.is_dir():
        return False
    if (path / CONFIG_NAME).is_file() or any(path.glob("*.ckpt")):
        return True
    ranks = [entry for entry in path.iterdir() if parse_rank_folder(entry.name)]
    return any(any(rank.glob("*.ckpt")) for rank in ranks)


def open_nemo(
    path: Path,
    *,
    scratch_dir: Path | None = None,
    depths: Mapping[str, Any] | None = None,
) -> TensorIndex:
    """Return the index of a NeMo checkpoint.

    Args:
        path: File or folder.
        scratch_dir: Where a gzip archive is unpacked while the reader is in use.
        depths: Configuration that tells the layers of each stage, where its own does not.

    Raises:
        CheckpointMismatchError: The checkpoint is unsafe, damaged or incomplete.
    """
    container = open_container(path, scratch_dir=scratch_dir)
    trees = _TreeCache()
    remarks: list[str] = []
    config = _read_config(container)
    ranks, weights = _find_weights(container, config, trees, remarks)
    if config is None:
        config = _config_of_checkpoint(trees(next(iter(weights.values()))), path)
    tp_size, pp_size = (
        count_of(config, f"{k}_model_parallel_size", default=1) for k in ("tensor", "pipeline")
    )
    by_rank = check_ranks(ranks, tp_size=tp_size, pp_size=pp_size, where=str(path))
    states = {place: _state(trees(weights[rank.folder])) for place, rank in by_rank.items()}
    maps = FileMaps()
    tensors = join_ranks(
        states,
        layer_offset=_layer_offset({**(depths or {}), **config}, pp_size),
        maps=maps,
        where=str(path),
    )
    return TensorIndex(
        format="nemo",
        path=path,
        source_config=config,
        tensors=tensors,
        source_files=_source_files(container, weights),
        tokenizer=_tokenizer_files(container, config),
        remarks=tuple(remarks),
        kept=container.kept,
    )


class _TreeCache:
    """Read each torch file once."""

    def __init__(self) -> None:
        self._trees: dict[Region, _Tree] = {}

    def __call__(self, region: Region) -> _Tree:
        if region not in self._trees:
            tree = read_torch_file(region)
            if not isinstance(tree, Mapping):
                raise CheckpointMismatchError(f"{region} does not hold a state dict")
            self._trees[region] = tree
        return self._trees[region]


def _state(tree: _Tree) -> dict[str, StoredTensor]:
    inner = tree.get("state_dict")
    return flatten(inner if isinstance(inner, Mapping) else tree)


def _read_config(container: Container) -> dict[str, Any] | None:
    names = [n for n in container.members if PurePosixPath(n).name == CONFIG_NAME]
    if CONFIG_NAME in names and container.path.is_file():
        names = [CONFIG_NAME]
    if not names:
        return None
    if len(names) > 1:
        raise CheckpointMismatchError(
            f"{container.path} holds several {CONFIG_NAME}: {', '.join(sorted(names))}; keep one"
        )
    import yaml

    try:
        config = yaml.safe_load(container.read(names[0], limit_bytes=_MAX_CONFIG_BYTES))
    except yaml.YAMLError as error:
        raise CheckpointMismatchError(f"{container.path}: {names[0]}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointMismatchError(f"{container.path}: {names[0]} is not a table")
    return config


def _config_of_checkpoint(tree: _Tree, path: Path) -> dict[str, Any]:
    parameters = tree.get("hyper_parameters")
    config = parameters.get("cfg") if isinstance(parameters, Mapping) else None
    if not isinstance(config, dict):
        raise CheckpointMismatchError(
            f"{path} has neither {CONFIG_NAME} nor hyper_parameters.cfg in its checkpoints"
        )
    return config


def _find_weights(
    container: Container, config: Mapping[str, Any] | None, trees: _TreeCache, remarks: list[str]
) -> tuple[list[RankName], dict[str, Region]]:
    """Return the rank folders and each one's weight file ("" is the root, rank 0)."""
    ranks = [rank for name in container.top_level() if (rank := parse_rank_folder(name))]
    if not ranks:
        ranks = [RankName("", 0, 0)]
    if any(name.startswith("model_weights/") for name in container.members):
        raise CheckpointMismatchError(
            f"{container.path} holds a distributed checkpoint (model_weights/); "
            f"expected {WEIGHTS_NAME}: save it from NeMo without dist_ckpt"
        )
    name = _weights_name(container, ranks, trees, remarks)
    found = {r.folder: container.find(_joined(r.folder, name)) for r in ranks}
    lost = sorted(folder for folder, region in found.items() if region is None)
    present = {folder: region for folder, region in found.items() if region is not None}
    if lost and (config is not None or not present):
        raise CheckpointMismatchError(
            [f"{container.path} lacks {_joined(folder, name)}" for folder in lost]
        )
    return [rank for rank in ranks if rank.folder in present], present


def _weights_name(
    container: Container, ranks: list[RankName], trees: _TreeCache, remarks: list[str]
) -> str:
    """Return the name of every rank's weight file; of several last checkpoints the newest."""
    if any(container.find(_joined(rank.folder, WEIGHTS_NAME)) for rank in ranks):
        return WEIGHTS_NAME
    folders = {rank.folder for rank in ranks}
    found = {
        PurePosixPath(name).name: region
        for name, region in sorted(container.members.items())
        if name.rpartition("/")[0] in folders and name.endswith("last.ckpt")
    }
    if not found:
        raise CheckpointMismatchError(
            f"{container.path} has no weights: expected {WEIGHTS_NAME} or *last.ckpt"
            + (" in each rank's folder" if ranks[0].folder else "")
        )
    if len(found) == 1:
        return next(iter(found))
    steps = {name: _step(name, region, trees) for name, region in found.items()}
    newest = max(steps, key=lambda name: (steps[name], name))
    others = ", ".join(f"{name} of step {step}" for name, step in steps.items() if name != newest)
    remarks.append(
        f"took {newest} of step {steps[newest]}, the newest of several last checkpoints "
        f"(left: {others})"
    )
    return newest


def _step(name: str, region: Region, trees: _TreeCache) -> int:
    """Return the training step a checkpoint's name tells, or else the file itself."""
    match = _STEP.search(name)
    step = int(match[1]) if match else trees(region).get("global_step")
    return step if isinstance(step, int) else -1


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _layer_offset(config: Mapping[str, Any], pp_size: int) -> Callable[[str, int], int]:
    """Return the rule for a stage's first layer; encoder and decoder count apart."""
    split = config.get("pipeline_model_parallel_split_rank") or 0

    def offset(key: str, pp_rank: int) -> int:
        if "enc_dec_model" not in key:
            return pp_rank * _depth(config, "") // pp_size
        if not 0 < split < pp_size:
            raise CheckpointMismatchError(
                f"pipeline_model_parallel_split_rank = {split} with pipeline_model_parallel_size "
                f"= {pp_size}: expected a stage in between, where the decoder begins"
            )
        if ".decoder." in key:
            return (pp_rank - split) * (_depth(config, "decoder") // (pp_size - split))
        return pp_rank * (_depth(config, "encoder") // split)

    return offset


def _depth(config: Mapping[str, Any], side: str) -> int:
    inner = config.get(side)
    value = inner.get("num_layers") if isinstance(inner, Mapping) else None
    depth = value if value is not None else config.get("num_layers")
    if not isinstance(depth, int):
        raise CheckpointMismatchError(f"the checkpoint's num_layers is {depth!r}")
    return depth


def _source_files(container: Container, weights: Mapping[str, Region]) -> tuple[Path, ...]:
    if container.path.is_file():
        return (container.path,)
    return tuple(sorted({region.path for region in weights.values()}))


def _tokenizer_files(container: Container, config: Mapping[str, Any]) -> tuple[TokenizerFile, ...]:
    settings = config.get("tokenizer")
    if not isinstance(settings, Mapping):
        return ()
    kinds = (
        ("model", "tokenizer", "*.model"),
        ("vocab_file", "vocab", "*vocab*"),
        ("merge_file", "merges", "*merge*.txt"),
    )
    found = []
    for key, stem, pattern in kinds:
        region = _tokenizer_region(container, settings.get(key), pattern)
        if region is not None:
            suffix = PurePosixPath(region.name or region.path.name).suffix
            found.append(TokenizerFile(f"{stem}{suffix}", region.path, region.offset, region.size))
    return tuple(found)


def _tokenizer_region(container: Container, value: Any, pattern: str) -> Region | None:
    """Return where a tokenizer file lies: in the root of the checkpoint, or at its own path."""
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
    # A run that began with an archive names the archive's files, which its own folder lacks.
    if inside and container.path.is_file():
        raise CheckpointMismatchError(f"{container.path} lacks its tokenizer file {value!r}")
    return _outside_file(container.path, Path(value))


def _outside_file(checkpoint: Path, value: Path) -> Region | None:
    bases = [Path(), checkpoint, *list(checkpoint.resolve().parents)[:_ANCESTORS_SEARCHED]]
    for base in bases:
        file = base / value
        if file.is_file():
            return Region(file, 0, file.stat().st_size)
    return None
