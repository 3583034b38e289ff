"""Quantised Hugging Face folders as sources: their weights are dequantised while they are read.

FP8 weights can also be kept.

Forms: FP8 with a scale per tensor, row or block, int8 with scales, and packed integers, as saved by
compressed-tensors, ModelOpt, transformers' fine-grained FP8, AutoAWQ and GPTQ. Values are computed
in fp32 by the library's formula, scale x (value - zero point); the conversion rounds them once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export_scripts.checkpoints.base import (
    FLOATING_TYPES,
    CheckpointReader,
    ComputedPiece,
    FileMaps,
    IsAllowed,
    Piece,
    Pieces,
    ScaledPieces,
    StoredTensor,
    Tensors,
    json_file,
)
from export_scripts.checkpoints.chunks import ChunkedTensor
from export_scripts.numeric.dtypes import Shape
from foundations.errors import CheckpointMismatchError, Reasons, refuse
from foundations.files.json_content import Table, is_count
from foundations.files.yaml_content import read_table

if TYPE_CHECKING:
    from export_scripts.numeric.arrays import Array

QUANTIZATION = "quantization_config"
_MODELOPT_FILE = "hf_quant_config.json"
# Suffixes of scales of activations and of the cache, which a dequantised model does not need.
SCALES_OF_ACTIVATIONS = (
    ".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale",
    ".input_zero_point", ".input_global_scale", ".activation_scale",
)  # fmt: skip
_AS_IT_IS = "serve the folder as it is with deploy.engine=vllm, or convert the unquantised model"

_DONE = (
    "widened",
    "kept, without static scales of activations: each row is rounded with its own scale",
)

_WORDS = ("int32",)
_GPTQ_BITS = (2, 4, 8)

Pair = tuple[int, int]
# The tensors of a matrix, by the suffix of their names.
Parts = Mapping[str, StoredTensor]
# Takes the module `numeric.widening` (it imports numpy, which a check does not need) and the arrays
# by suffix; returns the matrix.
Widen = Callable[[Any, Mapping[str, "Array"]], "Array"]

Fit = tuple[Shape, Widen]  # the shape of a matrix, and the function that widens it


@dataclass(frozen=True)
class _Form:
    """The form in which a folder stores its quantised matrices."""

    value: str  # suffix of the tensor of values
    # Suffix of a further tensor -> whether it is required.
    companions: Mapping[str, bool]
    # Returns the shape of the matrix and the function that widens it. Raises ValueError for parts
    # of wrong types or shapes; the message begins with a suffix.
    fit: Callable[[Parts], Fit]
    # Returns the scales (out, groups) of a matrix in FP8, and the number of inputs per scale.
    scales: Callable[[Parts], tuple[Piece, int]] | None = None
    # Whether parts hold the matrices of all experts, along their first axis.
    is_stacked: bool = False


def quantization(reader: CheckpointReader) -> Table | None:
    """Return the quantisation settings of a Hugging Face folder, None for plain weights."""
    stated = reader.config.get(QUANTIZATION)
    if stated is not None:
        return stated if isinstance(stated, Mapping) else {"quant_method": stated}
    path = reader.home / _MODELOPT_FILE
    if reader.format != "huggingface" or not path.is_file():
        return None
    table = json_file(path).get("quantization")
    return {"quant_method": "modelopt", **table} if isinstance(table, Mapping) else None


def with_plain_weights(
    reader: CheckpointReader,
    is_allowed: IsAllowed = lambda _: False,
    *,
    keeps_fp8: bool = False,
) -> CheckpointReader:
    """Return a checkpoint with plain weights in place of quantised ones; others unchanged.

    Args:
        reader: The checkpoint.
        is_allowed: Takes the name of an unknown setting; whether the user allows to ignore it.
        keeps_fp8: Whether the FP8 values will be used, which the result has as well.

    Raises:
        CheckpointMismatchError: The form is not supported, or tensors do not fit together; each
            is named.
    """
    settings = quantization(reader)
    if settings is None:
        return reader
    method = str(settings.get("quant_method", "unknown"))
    try:
        if method not in _FORMS:
            raise ValueError(f"quant_method = {method}: known are {', '.join(_FORMS)}")
        unknown = _unknown_settings(method, settings)
        if named := [text for name, text in unknown.items() if not is_allowed(name)]:
            raise ValueError(
                f"{', '.join(named)}: not known, and may change what is computed "
                "(--allow-setting passes a setting by name)"
            )
        form = _FORMS[method](settings, reader.tensors)
        if form.value == ".qweight" and reader.config.get("model_type") == "gpt2":
            raise ValueError("GPT-2's matrices are transposed")
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise CheckpointMismatchError(
            f"{reader.path}: the quantised weights cannot be widened: {error}; {_AS_IT_IS}"
        ) from error
    tensors, fp8, groups = _wide_tensors(reader, form)
    return dataclasses.replace(
        reader,
        config={key: value for key, value in reader.config.items() if key != QUANTIZATION},
        tensors=tensors,
        fp8=fp8 if len(groups) == 1 else {},
        fp8_group=min(groups, default=0),
        remarks=(*reader.remarks, f"weights quantised by {method} are {_DONE[keeps_fp8]}"),
    )


@functools.cache
def known_settings(what: str) -> frozenset[str]:
    """Return the known settings of a method, or of a part of it (quantization_settings.yaml)."""
    table = read_table(Path(__file__).with_name("quantization_settings.yaml"))
    return frozenset(str(table[what]).split())


def _unknown_settings(method: str, settings: Table) -> Reasons:
    """Return the settings that are set but not known: name -> text with the value."""
    groups = (settings.get("config_groups") or {}).values() if method != "modelopt" else ()
    tables = [(settings, method)]
    for group in groups:
        tables += [(group, "group"), (group["weights"], "weights")]
    return {
        name: f"{name} = {value!r:.100}"
        for table, what in tables
        for name, value in table.items()
        if name not in known_settings(what) and value not in (None, "", [], {})
    }


def _wide_tensors(
    reader: CheckpointReader, form: _Form
) -> tuple[Tensors, dict[str, ScaledPieces], set[int]]:
    """Return all tensors widened, FP8 matrices with scales, and the numbers of inputs per scale."""
    plain = reader.tensors
    fp8: dict[str, ScaledPieces] = {}
    groups: set[int] = set()
    tensors: Tensors = {}
    taken: set[str] = set()
    problems: list[str] = []
    for key in plain:
        name = key.removesuffix(form.value)
        ends = (form.value, *(end for end in form.companions if name + end in plain))
        is_wide = len(ends) == 1 and plain[key][0].dtype in FLOATING_TYPES
        if name == key or is_wide:
            continue
        taken |= {name + end for end in ends}
        if missing := [e for e, needed in form.companions.items() if needed and e not in ends]:
            problems += [f"{name}{end} is missing, which {key} needs" for end in missing]
            continue
        parts = {end: plain[name + end][0].stored[0] for end in ends}
        try:
            if form.is_stacked:
                tensors[name] = _expert_matrices(form, parts)
                continue
            tensors[f"{name}.weight"] = (_wide(*form.fit(parts), parts),)
            if form.scales is not None:
                scales, group = form.scales(parts)
                fp8[f"{name}.weight"] = parts[form.value], scales
                groups.add(group)
        except ValueError as error:
            problems.append(f"{name}{error}")
    refuse(problems, reader.path)
    rest = {
        key: pieces
        for key, pieces in plain.items()
        if key not in taken and not key.endswith((*SCALES_OF_ACTIVATIONS, ".weight_shape"))
    }
    return rest | tensors, fp8, groups


def _expert_matrices(form: _Form, parts: Parts) -> Pieces:
    """Return the matrices of all experts as one piece; each can be computed separately."""
    counts = {part.shape[0] if part.shape else 0 for part in parts.values()}
    if len(counts) > 1 or 0 in counts:
        raise ValueError(f" has parts of {' and '.join(map(str, sorted(counts)))} experts")
    chunks = {}
    for number in range(*counts):
        own = {end: part.select(number) for end, part in parts.items()}
        shape, widen = form.fit(own)
        chunks[(number, *(0 for _ in shape))] = _wide((1, *shape), widen, own)
    return ChunkedTensor("fp32", (len(chunks), *shape), chunks).pieces


@dataclass(frozen=True)
class WidePiece(ComputedPiece):
    """A quantised matrix (out, in) as fp32 values.

    `filled` computes it as if every byte of its stored integers had the same value.
    """

    filled: Callable[[FileMaps, int], Array]

    def limits(self, maps: FileMaps) -> tuple[Array, Array]:
        """Return the values of the smallest and of the largest stored integer at each place."""
        low, high = (0x80, 0x7F) if self.stored[0].dtype == "int8" else (0, 0xFF)
        return self.filled(maps, low), self.filled(maps, high)


def _wide(shape: Shape, widen: Widen, parts: Parts) -> Piece:
    def compute(maps: FileMaps, byte: int | None = None) -> Array:
        from export_scripts.numeric import widening

        loaded = {name: part.load(maps) for name, part in parts.items()}
        if byte is not None:
            name = next(iter(loaded))  # the integers come first
            loaded[name] = loaded[name].copy()
            loaded[name].view("uint8")[:] = byte
        try:
            return widen(widening, loaded)
        except ValueError as error:  # an index is out of range
            raise CheckpointMismatchError(str(error)) from error

    return WidePiece("fp32", shape, tuple(parts.values()), compute, compute)


def _sizes(parts: Parts, end: str, types: Collection[str], *wanted: int | None) -> Shape:
    """Return the shape of a part, after checking its type and sizes; None is any size but 0."""
    part = parts[end]
    fits = len(part.shape) == len(wanted) and all(
        size > 0 if each is None else size == each
        for size, each in zip(part.shape, wanted, strict=True)
    )
    if not fits or part.dtype not in types:
        shape = ", ".join("any" if each is None else str(each) for each in wanted)
        raise ValueError(
            f"{end} is {part.dtype} {list(part.shape)}; expected {' or '.join(types)} [{shape}]"
        )
    return part.shape


def _grid(parts: Parts, end: str, sizes: Shape, block: Pair | None) -> tuple[Pair, Pair]:
    """Return the grid of a matrix's scales (rows, columns), and the block size of each.

    Without `block`, there is one scale, or one for each row and each of equal groups of columns.
    """
    shape, (rows, columns) = parts[end].shape, sizes
    count = math.prod(shape)
    if block is not None:
        grid = (-(-rows // block[0]), -(-columns // block[1]))
    else:
        grid = (1, 1) if count == 1 else (rows, max(1, count // rows))
        block = (rows // grid[0], columns // grid[1])
    is_whole = grid[0] * block[0] >= rows and grid[1] * block[1] >= columns
    fits = count == math.prod(grid) and (count == 1 or shape[0] == grid[0]) and is_whole
    if not fits or parts[end].dtype not in FLOATING_TYPES:
        raise ValueError(
            f"{end} is {parts[end].dtype} {list(shape)}; expected scales of blocks "
            f"{block[0]} x {block[1]} of {list(sizes)}"
        )
    return grid, block


def _scaled(
    scale: str, kind: str, block: Pair | None = None, bits: int = 0, *, has_zeros: bool = False
) -> _Form:
    """Return the form of FP8 or int8 values, or of words of `bits`, with scales.

    Zero points are accepted even where the settings do not require them.
    """
    zero = ".weight_zero_point"
    value = ".weight_packed" if bits else ".weight"

    def scales(parts: Parts) -> tuple[Piece, int]:
        part, sizes = parts[scale], parts[value].shape
        grid, (rows, inputs) = _grid(parts, scale, sizes, block)
        shape = (sizes[0], grid[1])

        def compute(maps: FileMaps) -> Array:
            from export_scripts.numeric import widening

            return widening.scales_of_rows(part.load(maps), grid, rows, shape[0])

        group = inputs if block or grid[1] > 1 else 0
        return ComputedPiece("fp32", shape, (part,), compute), group

    def fit(parts: Parts) -> Fit:
        rows, columns = _sizes(parts, value, (kind,), None, None)
        sizes = (rows, columns * 32 // bits if bits else columns)
        grid = _grid(parts, scale, sizes, block)
        if zero in parts and bits:  # the zero points of rows are packed in words
            _sizes(parts, zero, (kind,), -(-rows * bits // 32), grid[0][1])
        elif zero in parts:
            _sizes(parts, zero, (kind,), *parts[scale].shape)
        return sizes, lambda widening, loaded: widening.with_scales(
            loaded[value], loaded[scale], *grid, loaded.get(zero), bits
        )

    companions = {scale: True, zero: has_zeros}
    return _Form(value, companions, fit, scales if kind == "fp8" else None)


def _pair(sizes: Any) -> Pair | None:
    if sizes is None:
        return None
    rows, columns = sizes
    if not all(is_count(size, 1) for size in (rows, columns)):
        raise ValueError(f"blocks of {sizes}: expected two sizes")
    return rows, columns


def _fine_grained(settings: Table, names: Collection[str]) -> _Form:
    """quant_method fp8: by block or tensor; transformers and AutoFP8 name scales differently.

    transformers, integrations/finegrained_fp8.py; vllm, quantization/fp8.py.
    """
    inverse = ".weight_scale_inv"
    if settings.get("fmt", "e4m3") != "e4m3":
        raise ValueError(f"fmt = {settings['fmt']}: expected e4m3")
    block = _pair(settings.get("weight_block_size"))
    is_inverse = block or any(name.endswith(inverse) for name in names)
    return _scaled(inverse if is_inverse else ".weight_scale", "fp8", block)


def _modelopt(settings: Table, _: Collection[str]) -> _Form:
    """ModelOpt's FP8: a scale for each tensor, row or block.

    modelopt, torch/export/quant_utils.py.
    """
    algorithm = str(settings.get("quant_algo")).upper()
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"):
        raise ValueError(f"quant_algo = {settings.get('quant_algo')}: expected FP8")
    return _scaled(".weight_scale", "fp8", (128, 128) if algorithm == "FP8_PB_WO" else None)


def _compressed_tensors(settings: Table, _: Collection[str]) -> _Form:
    """compressed-tensors: FP8, int8 and packed integers.

    compressed_tensors, quantization/lifecycle/forward.py and compressors/.
    """
    found = settings.get("format")
    groups = [group["weights"] for group in settings["config_groups"].values()]
    weights = groups[0]
    if any(group != weights for group in groups):
        raise ValueError("its groups of layers are quantised differently")
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError("the weights are sparse, too")
    kind, bits = weights.get("type"), weights.get("num_bits")
    has_zeros = not weights.get("symmetric", True)
    block = _pair(weights.get("block_structure"))
    if found in ("float-quantized", "naive-quantized", "int-quantized") and bits == 8:
        stored = "int8" if kind == "int" else "fp8"
        return _scaled(".weight_scale", stored, block, has_zeros=has_zeros)
    if found == "pack-quantized" and kind == "int" and bits in (4, 8):
        if weights.get("actorder") in ("group", "dynamic"):
            raise ValueError("packed weights with reordered groups")
        return _scaled(".weight_scale", "int32", None, int(bits), has_zeros=has_zeros)
    raise ValueError(f"format = {found} of {bits} bits ({kind})")


def _awq(settings: Table, _: Collection[str]) -> _Form:
    """AutoAWQ's gemm layout: words of (in, out / 8), zero points and scales of (groups, out).

    GPTQModel stores zero points of 8 where it states that there are none.
    """
    bits = settings.get("bits", settings.get("w_bit"))
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if (bits, version) != (4, "gemm"):
        raise ValueError(f"awq of {bits} bits, version {version}: expected 4, gemm")

    def fit(parts: Parts) -> Fit:
        width, words = _sizes(parts, ".qweight", _WORDS, None, None)
        _check_groups(parts, width, words, words * 8)
        ends = (".qweight", ".qzeros", ".scales")
        return (words * 8, width), lambda widening, loaded: widening.awq(*map(loaded.get, ends))

    return _Form(".qweight", {".qzeros": True, ".scales": True}, fit)


def _gptq(settings: Table, _: Collection[str]) -> _Form:
    """GPTQ's layout: words of (in / n, out), zero points minus one, a group for each input.

    AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda.py; GPTQModel's gptq_v2 stores the zero
    points themselves.
    With the setting `dynamic` the bits may differ between matrices; the shapes show them.
    """
    usual = settings.get("bits")
    layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if usual not in _GPTQ_BITS or layout not in ("gptq", "gptq_v2"):
        raise ValueError(f"gptq of {usual} bits, checkpoint_format {layout}: expected 2, 4 or 8")
    zero_offset = 1 if layout == "gptq" else 0

    def fit(parts: Parts) -> Fit:
        words, out = _sizes(parts, ".qweight", _WORDS, None, None)
        _, zeros = _sizes(parts, ".qzeros", _WORDS, None, None)
        bits = next((each for each in _GPTQ_BITS if zeros * 32 == out * each), usual)
        width = words * 32 // bits
        _check_groups(parts, width, out * bits // 32, out)
        if ".g_idx" in parts:
            _sizes(parts, ".g_idx", ("int32", "int64"), width)
        ends = (".qweight", ".qzeros", ".scales", ".g_idx")
        return (out, width), lambda widening, loaded: widening.gptq(
            *map(loaded.get, ends), bits=bits, zero_offset=zero_offset
        )

    return _Form(".qweight", {".qzeros": True, ".scales": True, ".g_idx": False}, fit)


def _check_groups(parts: Parts, width: int, words: int, out: int) -> None:
    """Check the scales of groups of inputs, and their packed zero points."""
    groups, _ = _sizes(parts, ".scales", sorted(FLOATING_TYPES), None, out)
    _sizes(parts, ".qzeros", _WORDS, groups, words)
    if width % groups:
        raise ValueError(f".scales has {groups} groups, which do not divide {width} inputs")


def _mxfp4(*_: Any) -> _Form:
    """The experts of gpt-oss: (experts, out, in / 32, 16) bytes of two E2M1 values each.

    32 values share a power of two. OCP Microscaling Formats (MX) 1.0; transformers,
    integrations/mxfp4.py, convert_moe_packed_tensors.
    """

    def fit(parts: Parts) -> Fit:
        rows, groups, _ = _sizes(parts, "_blocks", ("uint8",), None, None, 16)
        _sizes(parts, "_scales", ("uint8",), rows, groups)
        return (groups * 32, rows), lambda widening, loaded: widening.mxfp4(
            loaded["_blocks"], loaded["_scales"]
        )

    return _Form("_blocks", {"_scales": True}, fit, is_stacked=True)


_FORMS: Mapping[str, Callable[[Table, Collection[str]], _Form]] = {
    "fp8": _fine_grained,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
