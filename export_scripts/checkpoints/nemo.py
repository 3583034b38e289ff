"""NeMo checkpoints: a .nemo archive, the folder it unpacks to, or a run's checkpoints folder.

Layout rules: NeMo 1.x, core/connectors/save_restore_connector.py and the checkpoint folders of
its Megatron models. NeMo 2 checkpoints are recognised here and read in nemo2.py.
"""

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from export_scripts.checkpoints.base import CheckpointReader, Files, Region
from export_scripts.checkpoints.containers import Container, is_gzip, open_container, read_yaml
from export_scripts.checkpoints.distributed import METADATA_NAME, is_distributed, read_distributed
from export_scripts.checkpoints.nemo2 import CONTEXT, WEIGHTS, open_nemo2
from export_scripts.checkpoints.partitioned import (
    LayerOffset,
    RankName,
    count_of,
    join_ranks,
    parse_rank_folder,
    rank_states,
    ranks_by_place,
)
from export_scripts.checkpoints.pt_archive import read_torch_file, read_torch_table
from export_scripts.checkpoints.tokenizers import nemo_files
from foundations.errors import CheckpointMismatchError, refuse
from foundations.files.json_content import Fields, Table, nested

CONFIG_NAME = "model_config.yaml"
WEIGHTS_NAME = "model_weights.ckpt"
_LITGPT = "lit_model.pth*"  # LitGPT's weights; its settings are also in CONFIG_NAME

# The folder of a distributed checkpoint in an archive.
_DISTRIBUTED = "model_weights/"
_STEP = re.compile(r"step=(\d+)")
# PyTorch Lightning adds a number to a name that is taken: last.ckpt, then last-v1.ckpt.
_LAST = re.compile(r"last(?:-v\d+)?\.ckpt$")

_Tree = Table
_Trees = Callable[[Region], _Tree]


def is_nemo(path: Path) -> bool:
    """Return whether a path looks like a NeMo archive, an unpacked one or a checkpoints folder."""
    if path.is_file():
        with path.open("rb") as file:
            return is_gzip(path) or file.read(512)[257:262] == b"ustar"
    return path.is_dir() and (
        ((path / CONFIG_NAME).is_file() and not any(path.glob(_LITGPT)))
        or any(file.is_file() for file in path.glob("*.ckpt"))
        or _is_distributed_nemo(_model_folder(path))
        or bool(_last_folders(path))
        or any(parse_rank_folder(e.name) and any(e.glob("*.ckpt")) for e in path.iterdir())
    )


def open_nemo(
    path: Path,
    *,
    scratch_dir: Path | None = None,
    depths: Table | None = None,
    name: str | None = None,
) -> CheckpointReader:
    """Return the index of a NeMo checkpoint.

    Args:
        path: File or folder.
        scratch_dir: The folder in which a gzip archive is unpacked while the reader is in use.
        depths: A configuration with the number of layers, if the checkpoint's own lacks it.
        name: The name, or a shell pattern, of the weight files in a run's folder; None for the
            last.

    Raises:
        CheckpointMismatchError: The checkpoint is unsafe, damaged or incomplete.
    """
    remarks: list[str] = []
    container = open_container(_chosen_folder(path, remarks), scratch_dir=scratch_dir)
    if WEIGHTS + METADATA_NAME in container.members:
        return open_nemo2(container, tuple(remarks))
    config = _read_config(container)
    for folder in (_DISTRIBUTED, ""):
        if folder + METADATA_NAME in container.members:
            inside = container.within(folder)
            found = read_distributed(inside, format="nemo", remarks=tuple(remarks))
            if config is None:
                config = _config_of_checkpoint(found.config, container.path)
            tokenizer = nemo_files(container, config)
            return dataclasses.replace(found, config=config, tokenizer=tokenizer)
    # Reads each file once.
    trees = functools.cache(lambda region: read_torch_table(region, "a state dict"))
    weights = _find_weights(container, config, trees, remarks, name)
    if config is None:
        config = _config_of_checkpoint(trees(next(iter(weights.values()))), path)
    places = ranks_by_place(weights, config, where=path)
    models = {place: _model(trees(weights[rank])) for place, rank in places.items()}
    config = dict(config)
    states = rank_states(models, config, where=path)
    layer_offset = _layer_offset({**depths, **config}, path) if depths else None
    return CheckpointReader(
        format="nemo",
        path=path,
        config=config,
        tensors=join_ranks(states, where=path, layer_offset=layer_offset),
        files=(container.path,)
        if container.path.is_file()
        else tuple(sorted({region.path for region in weights.values()})),
        tokenizer=nemo_files(container, config),
        remarks=tuple(remarks),
        keepalive=container.keepalive,
    )


def _model_folder(path: Path) -> Path:
    """Return the checkpoint's folder: the parent if `path` is its folder of weights."""
    sibling = {WEIGHTS: CONTEXT, _DISTRIBUTED: CONFIG_NAME}.get(f"{path.name}/")
    return path.parent if sibling and (path.parent / sibling).exists() else path


def _is_distributed_nemo(path: Path) -> bool:
    """Return whether a folder is a distributed checkpoint of NeMo, not of Megatron-LM."""
    # NeMo-RL has a folder weights/, too, which torch saves without megatron-core's metadata.
    if any((path / folder / METADATA_NAME).is_file() for folder in (WEIGHTS, _DISTRIBUTED)):
        return True
    common = path / "common.pt"
    if not is_distributed(path) or not common.is_file():
        return False
    return nested(read_torch_file(common), "hyper_parameters") is not None


def _last_folders(path: Path) -> list[Path]:
    """Return a run's distributed checkpoints called *last, except unfinished ones."""
    return [
        folder
        for folder in sorted(path.glob("*last"))
        if _is_distributed_nemo(folder)
        and not folder.with_name(f"{folder.name}-unfinished").exists()
    ]


def _chosen_folder(path: Path, remarks: list[str]) -> Path:
    """Return the checkpoint itself, or the newest one in a run's folder."""
    if not path.is_dir() or not (found := _last_folders(path)):
        return _model_folder(path)
    steps = {folder.name: _step_in(folder.name) for folder in found}
    return path / _newest({n: -1 if step is None else step for n, step in steps.items()}, remarks)


def _read_config(container: Container) -> Fields | None:
    names = [n for n in container.members if PurePosixPath(n).name == CONFIG_NAME]
    if CONFIG_NAME in names and container.path.is_file():
        names = [CONFIG_NAME]
    if not names:
        return None
    if len(names) > 1:
        raise CheckpointMismatchError(
            f"{container.path} holds several {CONFIG_NAME}: {', '.join(sorted(names))}; keep one"
        )
    return read_yaml(container, names[0])


def _config_of_checkpoint(tree: _Tree, path: Path) -> Fields:
    config = nested(tree, "hyper_parameters", "cfg")
    if not isinstance(config, dict):
        raise CheckpointMismatchError(
            f"{path} has neither {CONFIG_NAME} nor hyper_parameters.cfg in its checkpoints; for "
            "another trainer's, name the file, and its model's config.json (--model-config)"
        )
    return config


def _find_weights(
    container: Container,
    config: Table | None,
    trees: _Trees,
    remarks: list[str],
    asked: str | None,
) -> dict[RankName, Region]:
    """Return the weight file of each rank; a file in the root is rank 0's."""
    folders = {name.partition("/")[0] for name in container.members}
    ranks = [rank for name in folders if (rank := parse_rank_folder(name))]
    ranks = ranks or [RankName("", 0, 0)]
    inside = {rank.folder for rank in ranks}
    every = {
        PurePosixPath(name).name: region
        for name, region in sorted(container.members.items())
        if name.rpartition("/")[0] in inside and name.endswith(".ckpt")
    }
    if asked:
        name = _matching_name(container.path, every, asked)
    elif WEIGHTS_NAME in every:
        name = WEIGHTS_NAME
    else:
        where = " in each rank's folder" if ranks[0].folder else ""
        name = _last_name(container.path, every, trees, remarks, where)
    files = {rank: PurePosixPath(rank.folder, name).as_posix() for rank in ranks}
    present = {rank: container.members[f] for rank, f in files.items() if f in container.members}
    lost = sorted(file for rank, file in files.items() if rank not in present)
    if config is not None or not present:
        refuse([f"{container.path} lacks {file}" for file in lost])
    return present


def _model(tree: _Tree) -> _Tree:
    """Return a rank's model; the parts of an interleaved schedule get their missing `model.`."""
    parts = {key: part for key, part in tree.items() if re.fullmatch(r"model\d+", str(key))}
    return {key: {"model": part} for key, part in parts.items()} or tree


def _matching_name(path: Path, every: Files, asked: str) -> str:
    """Return the name of the weight files that the user's name or pattern matches."""
    found = [name for name in every if fnmatch.fnmatchcase(name, asked)]
    found = found or [name for name in every if fnmatch.fnmatchcase(name, f"{asked}.ckpt")]
    if len(found) != 1:
        which = f"names several: {', '.join(found)}" if found else "is none of its checkpoints"
        raise CheckpointMismatchError(
            f"{path}: {asked} {which}; it has {', '.join(every) or 'none'}"
        )
    return found[0]


def _last_name(path: Path, every: Files, trees: _Trees, remarks: list[str], where: str) -> str:
    """Return the name of the last weight files, the newest if several are called last."""
    found = {name: region for name, region in every.items() if _LAST.search(name)}
    if not found:
        raise CheckpointMismatchError(
            f"{path} has no weights: expected {WEIGHTS_NAME} or *last.ckpt{where}"
            + (f"; name one of {', '.join(every)}" if every else "")
        )
    if averaged := [name for name in every if name.endswith("last-EMA.ckpt")]:
        remarks.append(f"left {', '.join(averaged)}, the weights averaged over training")
    if len(found) == 1:
        return next(iter(found))
    steps = {}
    for name, region in found.items():
        step = _step_in(name)
        step = trees(region).get("global_step") if step is None else step
        steps[name] = step if isinstance(step, int) else -1
    return _newest(steps, remarks)


def _newest(steps: Mapping[str, int], remarks: list[str]) -> str:
    """Return the name with the highest step (-1: unknown), and add a remark on the others."""
    newest = max(steps, key=lambda name: (steps[name], name))
    if left := [f"{name} of step {step}" for name, step in steps.items() if name != newest]:
        remarks.append(
            f"took {newest} of step {steps[newest]}, the newest of several last checkpoints "
            f"(left: {', '.join(left)})"
        )
    return newest


def _step_in(name: str) -> int | None:
    match = _STEP.search(name)
    return int(match[1]) if match else None


def _layer_offset(config: Table, path: Path) -> LayerOffset:
    """Return the rule for a stage's first layer; encoder and decoder are counted separately."""
    split = config.get("pipeline_model_parallel_split_rank") or 0
    pp_size = count_of(config, "pipeline_model_parallel_size", default=1, where=path)

    def depth(side: str) -> int:
        own = nested(config, side, "num_layers") is not None
        return count_of(config[side] if own else config, "num_layers", default=0, where=path)

    def offset(key: str, pp_rank: int) -> int:
        if "enc_dec_model" not in key:
            return pp_rank * depth("") // pp_size
        if type(split) is not int or not 0 < split < pp_size:
            raise CheckpointMismatchError(
                f"{path}: pipeline_model_parallel_split_rank = {split!r:.100} with "
                f"pipeline_model_parallel_size = {pp_size}: expected a stage in between, where the "
                "decoder begins"
            )
        if ".decoder." in key:
            return (pp_rank - split) * (depth("decoder") // (pp_size - split))
        return pp_rank * (depth("encoder") // split)

    return offset
