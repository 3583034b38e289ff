"""Compare an FT folder's files with what the converter would write of the source, byte by byte."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from export_scripts.checkpoints import recognise_format
from export_scripts.conversion.plan import ConversionPlan, plan_conversion
from export_scripts.conversion.request import OPTION_NAMES, ConversionRequest
from export_scripts.conversion.sharding import ValueRange, file_chunks
from export_scripts.conversion.tensor_plan import TensorPlan, rank_window
from export_scripts.conversion.write import build_parts
from export_scripts.errors import CheckpointMismatchError
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.mapping.sources import Adjusted, Compute
from export_scripts.ft.reader import FTReader
from export_scripts.numeric.dtypes import torch_dtype

# Sums of products may round differently on another machine, by this share of the largest value.
_ROUNDING = {"fp32": 1e-6, "fp16": 2.0**-10, "bf16": 2.0**-7}
# From the tokenizer of a NeMo or Megatron source, whose files may be missing: the folder's values
# are used.
_TOKEN_IDS = ("start_id", "end_id", "decoder_start_token_id", "eos_token_id", "pad_id")
_UNCOMPARED_SETTINGS = ("model_name", "name_or_path", "tensor_para_size", "weight_data_type")
_TIE, _TABLES = "tie_word_embeddings", ("model.wte", "model.lm_head.weight")
_LAYER = re.compile(r"\.(?:layers?|block)\.(\d+)\.")


@dataclass(frozen=True)
class FileDifference:
    """A file that holds other values than the converter would write.

    Attributes:
        tensor: name of the tensor, the file's stem without its rank.
        where: part of the model, in the words of `Place.where`.
        values: values in the file; `differing` of them differ, by up to `max_abs`.
    """

    tensor: str
    file: str
    where: str
    values: int
    differing: int
    max_abs: float


@dataclass(frozen=True)
class WeightComparison:
    """The comparison of a folder's files with a source.

    Attributes:
        format: the source's, such as "huggingface" or "nemo".
        title: what the source is, for people.
        tensors, files: how many were compared.
        differences: in the order of computation.
        missing: tensors that the source makes and the folder lacks.
        not_compared: tensors of the folder that the source does not make.
        settings: differences of config.ini.
        conflicts: what the source has and the folder cannot be equal to, one sentence each.
    """

    format: str
    title: str
    tensors: int
    files: int
    differences: tuple[FileDifference, ...]
    missing: tuple[str, ...]
    not_compared: tuple[str, ...]
    settings: tuple[str, ...]
    conflicts: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Return whether the folder has every weight of the source, as it is there."""
        return not (self.differences or self.missing or self.conflicts)


def source_plan(
    checkpoint: Path, reader: FTReader, *, given: Sequence[tuple[str, str]], scratch_dir: Path
) -> ConversionPlan:
    """Return how a source, a file or a folder, would become the folder of `reader`.

    `given` are (config key, value) pairs that the source does not state, as for the conversion;
    gzip archives are unpacked in `scratch_dir` while the plan is in use.

    Raises:
        CheckpointMismatchError: The source cannot become such a folder; every reason is listed.
        ValueError: The path is not a known checkpoint.
    """
    ids = []
    if recognise_format(checkpoint) != "huggingface":
        fields = {field.name for field in dataclasses.fields(reader.config)}
        ids = [(name, str(getattr(reader.config, name))) for name in _TOKEN_IDS if name in fields]
    request = ConversionRequest(
        checkpoint_path=checkpoint,
        output_dir=reader.path.parent,
        tp_size=reader.tp_size,
        weight_data_type=reader.weight_data_type,
        allow=("*",),  # the conversion has logged what it left out
        allow_setting=("*",),
        model_type=reader.family.name,
        given=(*ids, *given),
        names={**OPTION_NAMES, "model_type": f"the family of {reader.path}"},
    )
    return plan_conversion(request, scratch_dir=scratch_dir)


def compare_weights(plan: ConversionPlan, reader: FTReader) -> WeightComparison:
    """Compare every tensor of a folder with what its source's plan makes.

    Raises:
        CheckpointMismatchError: Tensors have other shapes.
    """
    present = [item for item in plan.tensors if reader.has(item.tensor.name)]
    settings = _setting_differences(plan.config, reader.config)
    _check_sizes(present, reader, settings)
    found = [each for item in present for each in _differences(plan, item, reader)]
    planned = {item.tensor.name for item in plan.tensors}
    needed = {item.tensor.name for item in plan.tensors if not item.tensor.optional}
    return WeightComparison(
        format=plan.facts.reader.format,
        title=plan.mapping.title,
        tensors=len(present),
        files=sum(len(item.tensor.file_names(reader.tp_size)) for item in present),
        differences=tuple(sorted(found, key=lambda each: _order(each.tensor))),
        missing=tuple(sorted(needed - set(reader.names()), key=_order)),
        not_compared=tuple(name for name in reader.names() if name not in planned),
        settings=settings,
        conflicts=(*_unread(plan), *_wrong_tie(plan, reader)),
    )


def _unread(plan: ConversionPlan) -> Iterator[str]:
    """Yield the source's tensors of which the folder holds nothing."""
    facts, mapping = plan.facts, plan.mapping
    read = {key for item in plan.tensors for key, _ in item.reads}
    used = {facts.resolve(key) for key in (*read, *mapping.copies(facts, plan.config))}
    for key in facts.keys():  # noqa: SIM118 - not a mapping
        if key not in used and not mapping.is_ignored(key):
            yield f"{key} of the source is not in the folder"


def _wrong_tie(plan: ConversionPlan, reader: FTReader) -> Iterator[str]:
    """Yield that a source has two tables of tokens, and says that they are one."""
    is_tied = plan.facts.reader.format == "huggingface" and plan.facts.config.get(_TIE) is True
    read = {item.tensor.name: {key for key, _ in item.reads} for item in plan.tensors}
    is_one = set.intersection(*(read.get(name, set()) for name in _TABLES))
    if is_tied and not is_one and all(map(reader.has, _TABLES)):
        table, head = (reader.read(name) for name in _TABLES)
        count = min(len(table), len(head))  # one may be padded
        if not torch.equal(table[:count], head[:count]):
            yield (
                f"the source has a head that differs from its embedding, and {_TIE}=true: which "
                "of them a library takes depends on its version"
            )


def _check_sizes(items: Sequence[TensorPlan], reader: FTReader, settings: Sequence[str]) -> None:
    """Fail on files of other sizes than the source's, with the settings that may explain them.

    Raises:
        CheckpointMismatchError: naming every tensor.
    """
    stored = {t.name: t.shape for _, _, t in reader.family.expand(reader.config)}
    problems = [
        f"{reader.path}: {item.tensor.name} has shape {list(stored[item.tensor.name])}, the "
        f"source makes it {list(item.tensor.shape)}"
        for item in items
        if stored[item.tensor.name] != item.tensor.shape
    ]
    if problems:
        wrong = [f"{reader.path}: config.ini has {setting}" for setting in settings]
        raise CheckpointMismatchError([*wrong, *problems])


def _differences(
    plan: ConversionPlan, item: TensorPlan, reader: FTReader
) -> Iterator[FileDifference]:
    """Yield what differs in each file of one tensor."""
    kind = item.tensor.dtype or reader.weight_data_type
    parts = build_parts(plan, item)
    computed = isinstance(item.source, (Adjusted, Compute))
    for rank, file in enumerate(item.tensor.file_names(reader.tp_size)):
        pieces = [(parts, rank_window(parts, item.tensor, reader.tp_size, rank), ValueRange())]
        chunks = file_chunks(pieces, kind, item.tensor.file_bytes(reader.tp_size, kind))
        differing, max_abs, largest = _compare_file(reader.path / file, chunks, torch_dtype(kind))
        if differing and not (computed and max_abs <= _ROUNDING[kind] * largest):
            yield FileDifference(
                tensor=item.tensor.name,
                file=file,
                where=_where(item.tensor.name),
                values=math.prod(item.tensor.local_shape(reader.tp_size)),
                differing=differing,
                max_abs=max_abs,
            )


def _compare_file(
    path: Path, chunks: Iterable[memoryview], dtype: torch.dtype
) -> tuple[int, float, float]:
    """Return how many values differ, by how much at most, and the largest one expected.

    A file whose bytes are right is read once and gives zeros.
    """
    differing, max_abs, largest = 0, 0.0, 0.0
    with path.open("rb") as file:
        for chunk in chunks:
            stored = bytearray(file.read(len(chunk)))
            if np.array_equal(np.frombuffer(stored, np.uint8), np.frombuffer(chunk, np.uint8)):
                continue
            expected = torch.frombuffer(bytearray(chunk), dtype=dtype).float()
            found = torch.frombuffer(stored, dtype=dtype).float()
            error = (found - expected).abs().nan_to_num(nan=float("inf"))
            differing += int((found != expected).sum())
            max_abs = max(max_abs, float(error.max()))
            largest = max(largest, float(expected.abs().max()))
    return differing, max_abs, largest


def _setting_differences(expected: FTConfig, found: FTConfig) -> tuple[str, ...]:
    """Return the config.ini values that the source would make otherwise."""
    return tuple(
        f"{field.name} = {getattr(found, field.name)}, the source makes it "
        f"{getattr(expected, field.name)}"
        for field in dataclasses.fields(expected)
        if field.name not in _UNCOMPARED_SETTINGS
        and not field.metadata.get("skip")
        and getattr(found, field.name) != getattr(expected, field.name)
    )


def _where(tensor: str) -> str:
    """Return the part of the model a tensor belongs to, in the words of `Place.where`."""
    # Encoders of T5 begin with "encoder.", BERT's layers with "model.encoder.".
    stack = tensor.partition(".")[0]
    prefix = f"{stack} " if stack in ("encoder", "decoder") else ""
    if (found := _LAYER.search(tensor)) is not None:
        return f"{prefix}layer {found[1]}"
    if "final_layer" in tensor:
        return f"{prefix}final norm"
    return "logits" if "lm_head" in tensor or tensor == "shared.bias" else "embedding"


def _order(tensor: str) -> tuple[int, int]:
    """Return what sorts tensors by when they are used first; those of a layer stay in order."""
    where = _where(tensor)
    if "layer" in where:
        return 1 if "encoder" in where else 3, int(where.rpartition(" ")[2])
    stages = {"embedding": 0, "encoder final norm": 2, "logits": 5}
    return stages.get(where, 4), 0
