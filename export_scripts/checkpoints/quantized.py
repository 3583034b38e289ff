"""Quantised Hugging Face folders as sources: their weights are widened while they are read.

Forms: FP8 with one scale a tensor, a row or a block, int8 with scales, and packed integers as
compressed-tensors, ModelOpt, transformers' fine-grained FP8, AutoAWQ and GPTQ save them. Values are
computed in fp32 by the library's own formula, scale x (value - zero point); the conversion rounds
them once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export_scripts.checkpoints.base import (
    CheckpointReader,
    FileMaps,
    Piece,
    StoredTensor,
    TensorIndex,
    json_table,
    read_small,
)
from export_scripts.errors import CheckpointMismatchError, listed

if TYPE_CHECKING:
    from export_scripts.numeric.arrays import Array

QUANTIZATION = "quantization_config"
_MODELOPT_FILE = "hf_quant_config.json"
# Scales of activations and of the cache, which a model of wider weights does not need.
_ACTIVATIONS = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale",
                ".input_zero_point", ".weight_shape", ".input_global_scale")  # fmt: skip
_AS_IT_IS = "serve the folder as it is with deploy.engine=vllm, or convert the unquantised model"


@dataclass(frozen=True)
class WidePiece:
    """A quantised matrix (out, in) as the fp32 values that it stands for.

    Attributes:
        shape: Sizes of the values.
        parts: The tensors it is stored in, by the ends of their names.
        widen: Returns the values of the loaded parts.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, StoredTensor]
    widen: Callable[[Mapping[str, Array], tuple[int, ...]], Array]
    dtype: str = "fp32"

    @property
    def span_bytes(self) -> int:
        """Bytes of the values."""
        return 4 * math.prod(self.shape)

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """The tensors it is stored in."""
        return tuple(self.parts.values())

    def load(self, maps: FileMaps) -> Array:
        """Return the values."""
        loaded = {name: part.load(maps) for name, part in self.parts.items()}
        return self.widen(loaded, self.shape)

    def slabs(self, axis: int | None, unit: int = 1) -> tuple[Piece, ...]:  # noqa: ARG002
        """Return the whole."""
        return (self,)

    def same_bytes(self, other: Piece, maps: FileMaps) -> bool:
        """Return whether both are stored with the same bytes."""
        return (
            isinstance(other, WidePiece)
            and len(self.stored) == len(other.stored)
            and all(a.same_bytes(b, maps) for a, b in zip(self.stored, other.stored, strict=True))
        )


@dataclass(frozen=True)
class _Form:
    """The form in which a folder stores its quantised matrices.

    Attributes:
        value: End of the name of the tensor of values.
        companions: Ends of the names of tensors that go with it -> whether it must be there.
        shape: Sizes of the matrix, from its parts.
        widen: Its values.
    """

    value: str
    companions: Mapping[str, bool]
    shape: Callable[[Mapping[str, StoredTensor]], tuple[int, ...]]
    widen: Callable[[Mapping[str, Array], tuple[int, ...]], Array]


def quantization(reader: CheckpointReader) -> Mapping[str, Any] | None:
    """Return what a Hugging Face folder states about its quantised weights, None for plain ones."""
    stated = reader.config().get(QUANTIZATION)
    if stated is not None:
        return stated if isinstance(stated, Mapping) else {"quant_method": stated}
    path = Path(reader.path) / _MODELOPT_FILE
    if reader.format != "huggingface" or not path.is_file():
        return None
    table = json_table(read_small(path), path).get("quantization")
    return {"quant_method": "modelopt", **table} if isinstance(table, Mapping) else None


def with_plain_weights(reader: CheckpointReader) -> CheckpointReader:
    """Return a checkpoint with plain weights in place of quantised ones; others as they are.

    Raises:
        CheckpointMismatchError: They are quantised in another form; it is named.
    """
    settings = quantization(reader)
    if settings is None:
        return reader
    method = str(settings.get("quant_method", "unknown"))
    try:
        form = _FORMS[method](settings) if method in _FORMS else None
        if form is None:
            raise ValueError(f"quant_method = {method}: known are {', '.join(_FORMS)}")
        if form.value == ".qweight" and reader.config().get("model_type") == "gpt2":
            raise ValueError("GPT-2's matrices lie the other way round")
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointMismatchError(
            f"{reader.path}: the weights are quantised, and are not widened: {error}; {_AS_IT_IS}"
        ) from error
    tensors = _wide_tensors(reader, form)
    config = {key: value for key, value in reader.config().items() if key != QUANTIZATION}
    return TensorIndex(
        format=reader.format,
        path=reader.path,
        source_config=config,
        tensors=tensors,
        source_files=tuple(reader.files()),
        tokenizer=tuple(reader.tokenizer_files()),
        remarks=(*reader.notes(), f"weights quantised by {method} are widened"),
        kept=(reader,),
    )


def _wide_tensors(reader: CheckpointReader, form: _Form) -> dict[str, tuple[Piece, ...]]:
    plain = {key: tuple(reader.pieces(key)) for key in reader.keys()}  # noqa: SIM118
    tensors: dict[str, tuple[Piece, ...]] = {}
    taken: set[str] = set()
    missing: list[str] = []
    for key in plain:
        name = key.removesuffix(form.value)
        ends = (form.value, *(end for end in form.companions if name + end in plain))
        if name == key or not _is_quantised(plain[key], ends):
            continue
        missing += [
            f"{name}{end} is missing, which {key} needs"
            for end, needed in form.companions.items()
            if needed and name + end not in plain
        ]
        taken |= {name + end for end in ends}
        parts = {end: plain[name + end][0].stored[0] for end in ends}
        tensors[f"{name}.weight"] = (WidePiece(form.shape(parts), parts, form.widen),)
    if missing:
        raise CheckpointMismatchError(listed(missing, f"{reader.path}: "))
    rest = {
        key: pieces
        for key, pieces in plain.items()
        if key not in taken and not key.endswith(_ACTIVATIONS)
    }
    return rest | tensors


def _is_quantised(pieces: Sequence[Piece], ends: Sequence[str]) -> bool:
    return len(ends) > 1 or pieces[0].dtype in ("fp8", "int32", "int8")


def _scaled(
    values: Array, scale: Array, block: tuple[int, int] | None, zero: Array | None = None
) -> Array:
    """Return scale x (values - zero), a scale for the tensor, each row, or each block."""
    import numpy as np

    from export_scripts.numeric.arrays import to_float32

    scale = to_float32(scale)
    scale = scale.reshape(1, 1) if scale.size == 1 else scale
    scale = scale[:, None] if scale.ndim == 1 else scale.reshape(scale.shape[0], -1)
    if zero is not None:
        values = values - np.broadcast_to(zero, values.shape)
    rows, columns = block or (values.shape[0] // scale.shape[0], values.shape[1] // scale.shape[1])
    if (
        -(-values.shape[0] // rows) != scale.shape[0]
        or -(-values.shape[1] // columns) != (scale.shape[1])
    ):
        raise CheckpointMismatchError(
            f"scales {list(scale.shape)} of blocks {rows} x {columns} do not fit a matrix of "
            f"{list(values.shape)}"
        )
    for number, row in enumerate(scale):
        values[number * rows : (number + 1) * rows] *= np.repeat(row, columns)[: values.shape[1]]
    return values


def _from_fp8(values: Array) -> Array:
    """Return the values of bytes in FP8 E4M3 (no infinities; NaN is 0x7F and 0xFF)."""
    import numpy as np

    every = np.arange(256)
    exponent, mantissa = every >> 3 & 15, every & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    table = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    table[every & 127 == 127] = np.nan
    table = np.where(every >= 128, -table, table).astype(np.float32)
    return np.take(table, values)


def _unpacked(packed: Array, bits: int) -> Array:
    """Return the integers in 32-bit words on a new last axis, lowest bits first."""
    import numpy as np

    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    found: Array = (packed.view(np.uint32)[..., None] >> shifts & ((1 << bits) - 1)).astype(
        np.int16
    )
    return found


def _shape_of(end: str) -> Callable[[Mapping[str, StoredTensor]], tuple[int, ...]]:
    return lambda parts: parts[end].shape


def _fp8(scale: str, block: tuple[int, int] | None, zero: str | None = None) -> _Form:
    """Return the form of FP8 or int8 values with scales of their own tensor."""

    def widen(parts: Mapping[str, Array], shape: tuple[int, ...]) -> Array:  # noqa: ARG001
        import numpy as np

        values = parts[".weight"]
        wide = _from_fp8(values) if values.dtype == np.uint8 else values.astype(np.float32)
        return _scaled(wide, parts[scale], block, parts.get(zero or ""))

    return _Form(
        ".weight", {scale: True} | ({zero: False} if zero else {}), _shape_of(".weight"), widen
    )


def _pair(sizes: Any) -> tuple[int, int] | None:
    if sizes is None:
        return None
    rows, columns = (int(size) for size in sizes)
    return rows, columns


def _fine_grained(settings: Mapping[str, Any]) -> _Form:
    """quant_method fp8: of DeepSeek and Qwen by block, of AutoFP8 by tensor.

    transformers, integrations/finegrained_fp8.py; vllm, quantization/fp8.py.
    """
    if settings.get("fmt", "e4m3") != "e4m3":
        raise ValueError(f"fmt = {settings['fmt']}: expected e4m3")
    block = _pair(settings.get("weight_block_size"))
    return _fp8(".weight_scale_inv" if block else ".weight_scale", block)


def _modelopt(settings: Mapping[str, Any]) -> _Form:
    """ModelOpt's FP8: a scale for each tensor, row or block.

    modelopt, torch/export/quant_utils.py.
    """
    algorithm = str(settings.get("quant_algo")).upper()
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"):
        raise ValueError(f"quant_algo = {settings.get('quant_algo')}: expected FP8")
    block = (128, 128) if algorithm == "FP8_PB_WO" else None
    return _fp8(".weight_scale", block)


def _compressed_tensors(settings: Mapping[str, Any]) -> _Form:
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
    block = _pair(weights.get("block_structure"))
    if found in ("float-quantized", "naive-quantized", "int-quantized") and bits == 8:
        return _fp8(".weight_scale", block, ".weight_zero_point")
    if found == "pack-quantized" and kind == "int" and bits in (4, 8):
        if not weights.get("symmetric", True) or weights.get("actorder") == "group":
            raise ValueError("packed weights with zero points or reordered groups")
        return _packed(int(bits))
    raise ValueError(f"format = {found} of {bits} bits ({kind})")


def _packed(bits: int) -> _Form:
    per_word = 32 // bits

    def widen(parts: Mapping[str, Array], shape: tuple[int, ...]) -> Array:
        import numpy as np

        values = _unpacked(parts[".weight_packed"], bits).reshape(shape[0], -1)[:, : shape[1]]
        # Stored from 0: a signed integer and half its range.
        return _scaled((values - (1 << bits - 1)).astype(np.float32), parts[".weight_scale"], None)

    return _Form(
        ".weight_packed",
        {".weight_scale": True},
        lambda parts: (
            parts[".weight_packed"].shape[0],
            parts[".weight_packed"].shape[1] * per_word,
        ),
        widen,
    )


# AutoAWQ, awq/modules/linear/gemm.py: column of each of the 4-bit integers in a word.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _awq(settings: Mapping[str, Any]) -> _Form:
    """AutoAWQ's gemm layout: words of (in, out / 8), zero points and scales of (groups, out)."""
    bits = settings.get("bits", settings.get("w_bit"))
    version = str(settings.get("version", "gemm")).lower()
    if (bits, version) != (4, "gemm") or not settings.get("zero_point", True):
        raise ValueError(f"awq of {bits} bits, version {version}: expected 4, gemm, zero points")

    def apart(packed: Array) -> Array:
        import numpy as np

        values = _unpacked(packed, 4)[..., np.argsort(_AWQ_ORDER)]
        return values.reshape(packed.shape[0], -1)

    def widen(parts: Mapping[str, Array], shape: tuple[int, ...]) -> Array:
        import numpy as np

        values, zeros = apart(parts[".qweight"]), apart(parts[".qzeros"])
        group = shape[1] // zeros.shape[0]
        values -= np.repeat(zeros, group, axis=0)
        return _scaled(values.astype(np.float32).T, parts[".scales"].T, None)

    return _Form(
        ".qweight",
        {".qzeros": True, ".scales": True},
        lambda parts: (parts[".qweight"].shape[1] * 8, parts[".qweight"].shape[0]),
        widen,
    )


def _gptq(settings: Mapping[str, Any]) -> _Form:
    """GPTQ's layout: words of (in / n, out), zero points less one, a group for each input.

    AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda.py; GPTQModel's gptq_v2 stores them whole.
    """
    bits, layout = settings.get("bits"), settings.get("checkpoint_format") or "gptq"
    if bits not in (2, 4, 8) or layout not in ("gptq", "gptq_v2"):
        raise ValueError(f"gptq of {bits} bits, checkpoint_format {layout}: expected 2, 4 or 8")
    less = 1 if layout == "gptq" else 0
    per_word = 32 // bits

    def widen(parts: Mapping[str, Array], shape: tuple[int, ...]) -> Array:
        import numpy as np

        from export_scripts.numeric.arrays import to_float32

        out, width = shape
        words = _unpacked(parts[".qweight"], bits)  # (in / n, out, n)
        values = words.transpose(0, 2, 1).reshape(width, out)
        zeros = _unpacked(parts[".qzeros"], bits).reshape(-1, out)
        zeros = (zeros + less) & ((1 << bits) - 1)
        scales = to_float32(parts[".scales"])
        usual = np.arange(width) // (width // len(scales))
        group = parts.get(".g_idx", usual)
        return np.ascontiguousarray(((values - zeros[group]) * scales[group]).T)

    return _Form(
        ".qweight",
        {".qzeros": True, ".scales": True, ".g_idx": False},
        lambda parts: (parts[".qweight"].shape[1], parts[".qweight"].shape[0] * per_word),
        widen,
    )


_FORMS: Mapping[str, Callable[[Mapping[str, Any]], _Form]] = {
    "fp8": _fine_grained,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
}
