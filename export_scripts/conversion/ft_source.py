"""An FT folder as a source: the files of its ranks are the pieces of its tensors."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.base import (
    CheckpointReader,
    ComputedPiece,
    FileMaps,
    Record,
    StoredParts,
    StoredTensor,
)
from export_scripts.checkpoints.quantized import QUANTIZATION
from export_scripts.checkpoints.tokenizers import folder_members
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.spec import FTTensor, ModelFamily
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Copy, Sources
from export_scripts.ft.config_ini import CONFIG_NAME
from export_scripts.ft.layout import TOKENIZER_FILES
from export_scripts.ft.validation import open_directory, read_manifest
from foundations.files.json_content import Fields
from foundations.suggest import matches_any

FT_FORMAT = "fastertransformer"
_INT8_LEFT_OUT = (
    "static int8 weights and their scales are left out: the original weights are written"
)


@dataclass(frozen=True, kw_only=True)
class FTFolder(CheckpointReader):
    """The index of an FT folder."""

    mapping: SourceMapping  # to the folder's own layout, for other ranks or another type


def is_ft_folder(path: Path) -> bool:
    """Return whether a path is an FT folder."""
    return (path / CONFIG_NAME).is_file()


def open_ft_folder(path: Path) -> FTFolder:
    """Return the index of an FT folder.

    Sizes are checked now, the manifest's checksums when the tensors are read.

    Raises:
        CheckpointMismatchError: The folder differs from its config.ini.
    """
    family, config, stored = open_directory(path)
    manifest = read_manifest(path)
    sums = {name: int(record["crc32"], 16) for name, record in manifest["files"].items()}
    pieces = {name: _pieces(path, tensor, config, sums) for name, tensor in stored.items()}
    tensors = {
        name: each
        if stored[name].fp8_part is None
        else _widened(each, pieces[f"{name}_scale"], config)
        for name, each in pieces.items()
        if stored[name].fp8_part != 1
    }
    return FTFolder(
        format=FT_FORMAT,
        path=path,
        config={} if tensors.keys() == pieces.keys() else {QUANTIZATION: {"quant_method": "fp8"}},
        tensors=tensors,
        files=(path / CONFIG_NAME, *(s.path for ps in pieces.values() for s in ps)),
        tokenizer={
            name: file
            for name, file in folder_members(path).items()
            if matches_any(name, TOKENIZER_FILES)
        },
        mapping=_mapping(family, config),
        origin=str(manifest["source"].get("origin", "")),
        settings=manifest["source"].get("settings", {}),
    )


def _pieces(path: Path, tensor: FTTensor, config: FTConfig, sums: Mapping[str, int]) -> StoredParts:
    kind, tp_size = tensor.dtype or config.weight_data_type, config.tensor_para_size
    size, shape = tensor.file_bytes(tp_size, kind), tensor.local_shape(tp_size)
    return tuple(
        StoredTensor(
            path / name,
            0,
            kind,
            shape,
            record=Record(path / name, 0, size, sums[name]) if name in sums else None,
        )
        for name in tensor.file_names(tp_size)
    )


def _widened(
    values: StoredParts, scales: StoredParts, config: FTConfig
) -> tuple[ComputedPiece, ...]:
    """Return the fp32 pieces (in, out) of a matrix in FP8; all of them may share the scales."""
    group = getattr(config, "fp8_group_size", None)

    def piece(value: StoredTensor, scale: StoredTensor) -> ComputedPiece:
        def compute(maps: FileMaps) -> Any:
            from export_scripts.numeric import widening

            return widening.with_scales(value.load(maps).T, scale.load(maps).T, grid, block).T

        (inputs, outputs), groups = value.shape, scale.shape[0]
        grid, block = (outputs, groups), (1, group or inputs)
        return ComputedPiece("fp32", value.shape, (value, scale), compute)

    return tuple(piece(each, scales[min(n, len(scales) - 1)]) for n, each in enumerate(values))


def _mapping(family: ModelFamily, stored: FTConfig) -> SourceMapping:
    has_int8 = bool(getattr(stored, "int8", False))
    has_fp8 = getattr(stored, "fp8_group_size", None) is not None

    def config(facts: Facts) -> FTConfig:
        requested: Fields = {
            "tensor_para_size": facts.tp_size,
            "weight_data_type": facts.weight_data_type,
            **({"int8": None} if has_int8 else {}),
            **({"fp8_group_size": None} if has_fp8 else {}),
        }
        return dataclasses.replace(stored, **requested)

    def weights(facts: Facts, _: FTConfig) -> Sources:
        table = {spec.name: Copy(spec.name, cut=spec.split) for spec in family.layout}
        return {**table, **family.rank_dependent(stored, facts.keys())}

    return SourceMapping(
        name="fastertransformer",
        title=f"folder of {family.name} shards",
        family=family,
        format=FT_FORMAT,
        matches=lambda _: True,
        config=config,
        weights=weights,
        ignored=("*.int8", "*.scale", "*.scale_inter", "*.scale_out") if has_int8 else (),
        warnings=lambda *_: [_INT8_LEFT_OUT] if has_int8 else [],
    )
