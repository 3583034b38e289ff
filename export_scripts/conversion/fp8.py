"""The plan of a Hugging Face folder in FP8: the matrices of its layers are rounded to E4M3.

A matrix is rounded from the source's values, by block, by row or as a whole. Its scale, in fp32, is
the largest magnitude divided by 448 (1 if all values are zero); a value is its quotient by the
scale, rounded to the nearest value of E4M3, ties to even.

Forms: blocks as in DeepSeek-V3 and transformers, integrations/finegrained_fp8.py; rows and whole
matrices as in compressed-tensors' float-quantized (quantization/quant_config.py). vLLM 0.32 loads
them, model_executor/layers/quantization/fp8.py and compressed_tensors/.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from export_scripts.checkpoints.base import ComputedPiece, FileMaps, Piece
from export_scripts.checkpoints.quantized import QUANTIZATION
from export_scripts.conversion.huggingface import copied_tensor, with_weights
from export_scripts.conversion.plan import ConversionPlan
from export_scripts.conversion.tensor_plan import WrittenTensor
from export_scripts.families.mapping.sources import rearranged
from foundations.errors import CheckpointMismatchError, first_names, refuse
from foundations.files.json_content import Fields, json_bytes, json_object

if TYPE_CHECKING:
    from export_scripts.numeric.arrays import Array

_BLOCK = (128, 128)
# A matrix's sizes must be multiples of these: transformers widens only whole blocks, vLLM joins
# them, and FP8 kernels read 16 values at once.
_UNITS = {"block": 128, "channel": 16, "tensor": 16}
_NEW = "in FP8: "  # prefix of the keys of new tensors
_WEIGHT = ".weight"
# Matrices that servers do not load in FP8: routers, and the gate of a shared expert.
_WIDE = (".mlp.router.", ".mlp.shared.gate.")
# The end of the name of transformers' decoder classes, and the types of models whose matrices are
# not nn.Linear, or are parts that servers split.
_DECODER, _OTHER_MATRICES = "ForCausalLM", ("gpt2", "gpt_oss", "nemotron_h")


@dataclass
class _Matrix:
    """A matrix (out, in) of the folder, to be rounded."""

    source: ConversionPlan
    tensor: WrittenTensor
    form: str
    _scales: Array | None = field(default=None, init=False)  # computed with the values

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of the values that share a scale."""
        rows, columns = self.tensor.shape
        return {"block": _BLOCK, "channel": (1, columns), "tensor": (rows, columns)}[self.form]

    def pieces(self) -> Iterator[tuple[str, Piece, str]]:
        """Yield (name, values, type) of each tensor to store."""
        rows, columns = self.tensor.shape
        height, width = self.block
        grid = (-(-rows // height), -(-columns // width))
        shape = (1,) if self.form == "tensor" else grid
        reads = [(item, key) for item in self.tensor.items for key, _ in item.reads]
        pieces = (piece for _, key in reads for piece in self.source.facts.pieces(key))
        inputs = tuple(stored for piece in pieces for stored in piece.stored)
        name = self.tensor.key.removesuffix(_WEIGHT)
        scale = f"{name}.weight_scale{'_inv' if self.form == 'block' else ''}"
        values = ComputedPiece("fp8", self.tensor.shape, inputs, self._rounded)
        yield self.tensor.key, values, "fp8"
        yield (
            scale,
            ComputedPiece("fp32", shape, inputs, lambda maps: self._scale(maps).reshape(shape)),
            "fp32",
        )

    def _rounded(self, _: FileMaps) -> Array:
        from export_scripts.numeric.narrowing import to_fp8

        try:
            values, self._scales = to_fp8(self._values(), self.block)
        except ValueError as error:
            raise CheckpointMismatchError(f"{self.tensor.key} {error}") from error
        return values

    def _scale(self, maps: FileMaps) -> Array:
        if self._scales is None:  # they are in another file, whose worker came first
            self._rounded(maps)
        assert self._scales is not None
        return self._scales

    def _values(self) -> Array:
        """Return the matrix in fp32."""
        import numpy as np

        from export_scripts.conversion.sharding import Workspace, gather
        from export_scripts.conversion.tensor_plan import whole_window

        whole = np.empty(self.tensor.shape, np.float32)
        first = 0
        for item, view in self.tensor.pieces:
            assert view is not None
            parts = rearranged(item.build(self.source.facts, self.source.config), view)
            target = whole[first : first + view.shape[0]].reshape(parts.shape)
            gather(target, parts, whole_window(parts.shape), Workspace())
            first += view.shape[0]
        return whole


def in_fp8(source: ConversionPlan, folder: ConversionPlan) -> ConversionPlan:
    """Return the plan of a folder in FP8, from the plans of the source and of the unrounded folder.

    Raises:
        CheckpointMismatchError: No server loads this model in FP8.
    """
    form = folder.request.fp8
    assert form is not None
    config = json_object(folder.extra_files["config.json"], "config.json")
    classes = config.get("architectures") or [""]
    if _DECODER not in classes[0] or config.get("model_type") in _OTHER_MATRICES:
        refuse(
            [
                f"{source.facts.reader.path}: a {classes[0]} has no form in FP8 that servers load: "
                f"leave {folder.request.names['fp8']} out"
            ]
        )
    written = [tensor for (file,) in folder.files for tensor in file.tensors]
    # Servers join matrices of the same inputs: all of them must be in FP8, or none.
    unit = _UNITS[form]
    odd = {_join_key(t) for t in written if _is_layer_matrix(t) and any(n % unit for n in t.shape)}
    new = {}
    tensors = []
    wide = [] if any(tensor.key.startswith("lm_head.") for tensor in written) else ["lm_head"]
    for tensor in written:
        if _is_layer_matrix(tensor) and _join_key(tensor) not in odd:
            for key, piece, kind in _Matrix(source, tensor, form).pieces():
                name = f"{_NEW}{key}"  # the source may have a tensor of this key
                new[name] = (piece,)
                copy = copied_tensor(name, piece.shape)
                tensors.append(dataclasses.replace(copy, key=key, data_type=kind))
            continue
        tensors.append(tensor)
        is_matrix = len(tensor.shape) == 2 and tensor.key.endswith(_WEIGHT)
        wide += [tensor.key.removesuffix(_WEIGHT)] if is_matrix else []
    left = [
        tensor.key for tensor in written if _is_layer_matrix(tensor) and _join_key(tensor) in odd
    ]
    reason = f"sizes that {unit} does not divide have no form in FP8 that every library loads"
    if not new:
        refuse(
            [
                f"{source.facts.reader.path}: no matrix can be rounded: {reason}; leave "
                f"{folder.request.names['fp8']} out, or use channel, which needs multiples of "
                f"{_UNITS['channel']}"
            ]
        )
    config[QUANTIZATION] = _settings(form, wide)
    facts = source.facts
    reader = dataclasses.replace(facts.reader, tensors={**facts.reader.tensors, **new})
    remarks = [f"{first_names(left)}: not in FP8: {reason}"] if left else []
    plan = dataclasses.replace(
        folder,
        remarks=(*folder.remarks, *remarks),
        facts=dataclasses.replace(facts, reader=reader),
        extra_files={**folder.extra_files, "config.json": json_bytes(config)},
    )
    return with_weights(plan, tensors)


def _is_layer_matrix(tensor: WrittenTensor) -> bool:
    """Return whether a tensor is a matrix of a layer that servers load in FP8."""
    item = tensor.items[0]
    is_matrix = len(tensor.shape) == 2 and tensor.key.endswith(_WEIGHT)
    return is_matrix and bool(item.index) and not any(name in item.tensor.name for name in _WIDE)


def _join_key(tensor: WrittenTensor) -> tuple[str, int]:
    """Return (module, inputs), which are the same for matrices that a server may join."""
    return tensor.key.removesuffix(_WEIGHT).rpartition(".")[0], tensor.shape[1]


def _settings(form: str, wide: list[str]) -> Fields:
    """Return the quantization_config of config.json; `wide` are the modules not in FP8."""
    if form == "block":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(_BLOCK),
            "modules_to_not_convert": wide,
        }
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": form, "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": wide,
    }
