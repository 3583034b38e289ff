"""Products of few rows on a GPU with all that follows them in one kernel, in Triton's language.

Decoding reads every weight once per token, so these products are readings of memory: of the 4.4
TB/s of an H200 the ones below reach 4.1 to 4.3 at one row with GPT-J-6B's matrices in fp16 (cuBLAS
2.6 to 4.2, with further kernels for bias, activation and residual), in 8 bits 3.1 to 4.1. Import
this module only where Triton is installed. Batch-invariant products of any number of rows take the
same kernel.
"""

# Shapes: N rows, I inputs, O outputs

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from inference.parallel.epilogue import Epilogue, GemmActivation, GemmOptions
from inference.parallel.int8 import quantise
from inference.parallel.launch_cuda import (
    launch_options,
    let_next_begin,
    multiprocessors,
    read_ahead,
    shared_bytes,
    wait_for_earlier,
)
from inference.parallel.rounding_cuda import quantise_fp8, round_rows, widen, widened

_ACTIVATIONS: dict[GemmActivation | None, int] = {
    None: 0,
    "gelu_tanh": 1,
    "gelu_erf": 2,
    "relu": 3,
    "relu2": 5,
    "silu": 4,
}

# Tiles of one row's product, by the bytes of a weight. What counts is how many bytes all programs
# of a multiprocessor have on their way: in 16 bits 8 KB in each of 8, which 64 registers allow. Of
# twelve tiles for GPT-J-6B's matrices this is best or near it for all. In 8 bits adding up 16
# neighbours at once leaves room for 16 programs: 3.1 to 4.1 TB/s, without it 2.8 to 3.6.
_ONE_ROW: dict[int, dict[str, int]] = {
    2: {"OUTPUTS": 4, "INPUTS": 1024, "GROUP": 1, "num_warps": 4, "maxnreg": 64},
    1: {"OUTPUTS": 2, "INPUTS": 2048, "GROUP": 16, "num_warps": 2},
}
# Cache lines of each row of weights that a program in 16 bits asks for before it waits, beyond its
# first tile, where all programs run at once: a step of GPT-J-6B takes 3.18 ms without, 2.97 ms with
# 32. Products of more programs, and those in 8 bits, get slower by it.
_LINES_AHEAD = 32
_LINE_BYTES = 128
_PROGRAMS_AT_ONCE = 8  # on a multiprocessor
# Where there are fewer programs they read up to so many times as much at once. A step of GPT-2 350M
# takes 0.46 ms with this and with attention that reads the cache early, 0.64 ms without both.
_LARGEST_PROGRAM = 4

# Rows of a tile: with eight it would take as long as with 16.
_LEAST_ROWS, _MOST_TILE_ROWS = 16, 128
# With more rows cuBLAS is faster, by the bytes of a weight; for int8 the weights are widened first.
_MOST_ROWS = {2: 32, 1: 128}
# Outputs of products whose programs fill a GPU without sharing the inputs; those of fewer share
# them, at most 256 times 4 programs.
_MANY_OUTPUTS = 6144
_TICKETS = 256

# Outputs that a program finishes after a product by cuBLAS.
_FINISHED = {"OUTPUTS": 2048, "num_warps": 4}


@triton.jit
def _activated(y, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        inner = 0.7978845608028654 * (y + 0.044715 * y * y * y)  # sqrt(2 / pi)
        y = y * tl.sigmoid(2 * inner)  # (1 + tanh(inner)) / 2
    if ACTIVATION == 2:
        # erfc to 1.5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26. The
        # library's takes 65 us for 12,288 rows of 3072 where reading and writing takes 37.
        x = tl.abs(y) * 0.7071067811865476
        t = 1 / (1 + 0.3275911 * x)
        rest = -1.453152027 + t * 1.061405429
        rest = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * rest)))
        rest *= 0.5 * tl.exp(-x * x)
        y *= tl.where(y < 0, rest, 1 - rest)
    if ACTIVATION == 3:
        y = tl.maximum(y, 0.0)
    if ACTIVATION == 4:
        y = y * tl.sigmoid(y)
    if ACTIVATION == 5:
        y = tl.maximum(y, 0.0)
        y *= y
    return y


@triton.jit
def _of_outputs(at, output, inside, THERE: tl.constexpr):
    """Return a value of each output, 0 where there are none."""
    value = 0.0
    if THERE:
        value = tl.load(at + output, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _finished(
    y,
    output,
    scale,
    bias,
    first_activated,
    ACTIVATION: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Return sums y with scale, bias and activation of their outputs."""
    if HAS_SCALE:
        y *= scale
    if HAS_BIAS:
        y += bias
    if ACTIVATION > 0:
        y = tl.where(output < first_activated, y, _activated(y, ACTIVATION))
    return y


@triton.jit
def _gated(y, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return (OUTPUTS / 2, ROWS): activation(gate) * linear of their outputs, which alternate."""
    pairs = tl.permute(tl.reshape(y, (OUTPUTS // 2, 2, ROWS)), (0, 2, 1))
    gate, linear = tl.split(pairs)
    return _activated(gate, ACTIVATION) * linear


@triton.jit
def _weights(row_at, place, inputs):
    """Return a tile (OUTPUTS, INPUTS). Each weight is read once; the inputs stay in the cache."""
    inside = (place < inputs)[None, :]
    return tl.load(row_at + place[None, :], mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _partial_sums(
    weight,
    x_at,
    place,
    inputs,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Return (OUTPUTS, INPUTS / GROUP) sums of a tile's products with the row."""
    x = tl.load(x_at + place, mask=place < inputs, other=0.0).to(tl.float32)
    if weight.dtype == tl.int8:
        weight = widened(weight, NATIVE)
    products = weight.to(tl.float32) * x[None, :]
    if GROUP > 1:
        products = tl.sum(tl.reshape(products, (OUTPUTS, INPUTS // GROUP, GROUP)), 2)
    return products


@triton.jit
def _one_row(
    x_at,
    weight_at,
    scale_at,
    bias_at,
    residual_at,
    y_at,
    outputs,
    inputs,
    first_activated,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,  # to read ahead
    LINE: tl.constexpr,  # weights in a line
    ACTIVATION: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,  # whether outputs are pairs, see `_gated`
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < outputs
    row_at = weight_at + tl.minimum(output, outputs - 1)[:, None].to(tl.int64) * inputs
    place = tl.arange(0, INPUTS)
    weight = _weights(row_at, place, inputs)
    if LINES > 0:
        ahead = tl.minimum(INPUTS + tl.arange(0, LINES) * LINE, inputs - 1)
        read_ahead(row_at + ahead[None, :])
    scale = _of_outputs(scale_at, output, inside, HAS_SCALE)
    bias = _of_outputs(bias_at, output, inside, HAS_BIAS)
    wait_for_earlier(EARLY)
    residual = _of_outputs(residual_at, output, inside, HAS_RESIDUAL)
    total = _partial_sums(weight, x_at, place, inputs, OUTPUTS, INPUTS, GROUP, NATIVE)
    for first in range(INPUTS, inputs, INPUTS):
        place = first + tl.arange(0, INPUTS)
        weight = _weights(row_at, place, inputs)
        total += _partial_sums(weight, x_at, place, inputs, OUTPUTS, INPUTS, GROUP, NATIVE)
    y = tl.sum(total, 1)
    kind: tl.constexpr = 0 if GATED else ACTIVATION
    y = _finished(y, output, scale, bias, first_activated, kind, HAS_SCALE, HAS_BIAS)
    if HAS_RESIDUAL:
        y += residual
    if GATED:
        mixed = _gated(tl.reshape(y, (OUTPUTS, 1)), OUTPUTS, 1, ACTIVATION)
        pair = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)[:, None]
        tl.store(y_at + pair, mixed.to(y_at.dtype.element_ty), mask=pair < outputs // 2)
    else:
        tl.store(y_at + output, y.to(y_at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _some_rows(
    x_at,
    weight_at,
    scale_at,
    bias_at,
    residual_at,
    y_at,
    row_scale_at,
    parts_at,
    tickets_at,
    rows,
    x_stride,
    outputs,
    inputs,
    first_activated,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,  # programs that share the inputs of an output
    DIGITS: tl.constexpr,  # of x
    ACTIVATION: tl.constexpr,
    HAS_SCALE: tl.constexpr,  # of outputs, and of rows
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row_at = weight_at + tl.minimum(output, outputs - 1)[:, None].to(tl.int64) * inputs
    x_at += row[None, :].to(tl.int64) * x_stride
    second_at = x_at + rows.to(tl.int64) * x_stride
    share = tl.cdiv(tl.cdiv(inputs, INPUTS), PARTS) * INPUTS
    begin = tl.program_id(1) * share
    wait_for_earlier(EARLY)
    total = tl.zeros((OUTPUTS, ROWS), tl.int32 if DIGITS == 2 else tl.float32)
    small = tl.zeros((OUTPUTS, ROWS), tl.int32)
    for first in range(begin, tl.minimum(begin + share, inputs), INPUTS):
        place = first + tl.arange(0, INPUTS)
        weight = _weights(row_at, place, inputs)
        there = (row < rows)[None, :] & (place < inputs)[:, None]
        x = tl.load(x_at + place[:, None], mask=there, other=0.0)
        total = tl.dot(weight, x, total, out_dtype=total.dtype)
        if DIGITS == 2:
            second = tl.load(second_at + place[:, None], mask=there, other=0.0)
            small = tl.dot(weight, second, small, out_dtype=tl.int32)
    if DIGITS == 2:
        total = total.to(tl.float32) + small.to(tl.float32) * (1 / 254)
    output = output[:, None]
    place = row[None, :].to(tl.int64) * outputs + output
    inside = (output < outputs) & (row < rows)[None, :]
    last = True
    if PARTS > 1:
        # The last program adds up the parts of all, always in the same order.
        size = rows.to(tl.int64) * outputs
        tl.store(parts_at + tl.program_id(1) * size + place, total, mask=inside)
        tl.debug_barrier()  # all parts of this program are stored before its ticket is drawn
        ticket_at = tickets_at + tl.program_id(0)  # all rows are in one tile
        last = tl.atomic_add(ticket_at, 1) == PARTS - 1
        if last:
            tl.store(ticket_at, 0)
            total = tl.zeros((OUTPUTS, ROWS), tl.float32)
            for part in range(PARTS):
                at = parts_at + part * size + place
                total += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    if last:
        if HAS_SCALE:
            total *= tl.load(row_scale_at + row, mask=row < rows, other=0.0)[None, :]
        scale = _of_outputs(scale_at, output, inside, HAS_SCALE)
        bias = _of_outputs(bias_at, output, inside, HAS_BIAS)
        kind: tl.constexpr = 0 if GATED else ACTIVATION
        y = _finished(total, output, scale, bias, first_activated, kind, HAS_SCALE, HAS_BIAS)
        if HAS_RESIDUAL:
            y += tl.load(residual_at + place, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            mixed = _gated(y, OUTPUTS, ROWS, ACTIVATION)
            pair = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)[:, None]
            target_at = y_at + row[None, :].to(tl.int64) * (outputs // 2) + pair
            real = (pair < outputs // 2) & (row < rows)[None, :]
            tl.store(target_at, mixed.to(y_at.dtype.element_ty), mask=real)
        else:
            tl.store(y_at + place, y.to(y_at.dtype.element_ty), mask=inside)


def _tile(rows: int, outputs: int, item_bytes: int, *, batch_invariant: bool) -> dict[str, int]:
    """Return the tiles of the product of some rows.

    The best or nearly the best of twelve on an H200, for GPT-J-6B's two products of a layer and one
    of 4096 by 4096. At 16 and 32 rows the two take 98 and 101 us in 16 bits, with all that follows
    them (cuBLAS 107 and 102 without).
    """
    many = outputs >= _MANY_OUTPUTS
    if batch_invariant or rows > _MOST_TILE_ROWS:  # the order of a sum depends on these alone
        return {"OUTPUTS": 64, "INPUTS": 128, "PARTS": 1, "num_stages": 4, "num_warps": 4}
    if item_bytes == 1 and many:
        return {"OUTPUTS": 128, "INPUTS": 128, "PARTS": 1, "num_stages": 4, "num_warps": 8}
    if item_bytes == 1 and rows <= 2 * _LEAST_ROWS:
        parts = 2 if outputs >= 4096 else 4  # some 128 programs
        return {"OUTPUTS": 64, "INPUTS": 256, "PARTS": parts, "num_stages": 5, "num_warps": 4}
    parts = 1 if many else 4
    return {"OUTPUTS": 64, "INPUTS": 128, "PARTS": parts, "num_stages": 4, "num_warps": 4}


@cache
def _tickets(device: torch.device) -> torch.Tensor:
    """Return zeros, one for each program of a product that others share its inputs with."""
    return torch.zeros(_TICKETS, dtype=torch.int32, device=device)


@triton.jit
def _finish_rows(
    y_at,
    residual_at,
    outputs,
    first,
    first_activated,
    OUTPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(outputs - first, OUTPUTS)  # of a row
    output = first + program % tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < outputs
    place = program // tiles * outputs + output
    wait_for_earlier(EARLY)
    y = tl.load(y_at + place, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION > 0:
        y = tl.where(output < first_activated, y, _activated(y, ACTIVATION))
    if HAS_RESIDUAL:
        y += tl.load(residual_at + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_at + place, y.to(y_at.dtype.element_ty), mask=inside)


@triton.jit
def _gate_pairs(
    pairs_at, y_at, count, OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr, EARLY: tl.constexpr
):
    let_next_begin(EARLY)
    first = tl.program_id(0).to(tl.int64) * OUTPUTS
    place = 2 * first + tl.arange(0, 2 * OUTPUTS)
    wait_for_earlier(EARLY)
    pairs = tl.load(pairs_at + place, mask=place < 2 * count, other=0.0).to(tl.float32)
    gate, linear = tl.split(tl.reshape(pairs, (OUTPUTS, 2)))
    y = _activated(gate, ACTIVATION) * linear
    output = first + tl.arange(0, OUTPUTS)
    tl.store(y_at + output, y.to(y_at.dtype.element_ty), mask=output < count)


def _larger(tile: dict[str, int], times: int) -> dict[str, int]:
    """Return the tile with up to `times` its inputs and warps, a power of two."""
    times = 1 << max(times.bit_length() - 1, 0)
    return tile | {name: times * tile[name] for name in ("INPUTS", "num_warps")}


class CudaGemm:
    """A product in 16 bits: of few rows by the kernels above, of more by libraries.

    Weights may have 8 bits. Libraries take int8 ones widened to the type of x, and FP8 ones with
    rows of x in FP8.
    """

    def __init__(self, weight: torch.Tensor, epilogue: Epilogue, options: GemmOptions) -> None:
        """Keep `weight` (I, O), or its 8-bit copy, as (O, I), which cuBLAS reads as fast."""
        self.scale: torch.Tensor | None = None
        if options.int8:
            self.weight, self.scale = quantise(weight)
        elif options.fp8:
            self.weight, self.scale = quantise_fp8(weight)
        else:
            self.weight = weight.t().contiguous()
        self.epilogue = epilogue
        self.batch_invariant = options.batch_invariant
        self._is_fp8 = self.weight.dtype == torch.float8_e4m3fn
        # FP8 products of libraries take multiples of 16.
        libraries_cannot = self._is_fp8 and any(size % 16 for size in self.weight.shape)
        self._all_rows = options.batch_invariant or libraries_cannot
        self._item_bytes = self.weight.dtype.itemsize
        self._activation = _ACTIVATIONS[epilogue.activation]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return activation(x W + bias) + residual in the type of x."""
        if len(x) <= _MOST_ROWS[self._item_bytes] or self._all_rows:
            return self._fused(x, residual)
        if self.scale is None:
            return self._by_library(x, self.weight, residual)
        if not self._is_fp8:
            return self._by_library(x, widen(self.weight, self.scale, x.dtype), residual)
        rounded, row_scale = round_rows(x, self.weight.dtype)
        y = torch._scaled_mm(
            rounded[0],
            self.weight.t(),
            scale_a=row_scale.unsqueeze(1),
            scale_b=self.scale.unsqueeze(0),
            out_dtype=torch.bfloat16,  # the only one with scales of rows
        ).to(x.dtype)
        return self._finished(
            y if self.epilogue.bias is None else y.add_(self.epilogue.bias), residual
        )

    def _fused(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return activation(x W + bias) + residual by `_one_row` or `_some_rows`.

        Rows are rounded to FP8 for weights in FP8, and to 15 bits for int8 if there are several.
        """
        (rows, inputs), (weight, scale) = x.shape, (self.weight, self.scale)
        outputs, bias, gated = len(weight), self.epilogue.bias, self.epilogue.gated
        x = x if x.stride(1) == 1 else x.contiguous()
        y = x.new_empty(rows, outputs // 2 if gated else outputs)
        # Absent tensors are not read, but need some pointer in their place.
        scale_at, bias_at = x if scale is None else scale, x if bias is None else bias
        pointers = (weight, scale_at, bias_at, x if residual is None else residual.contiguous(), y)
        sizes = (outputs, inputs, self.epilogue.first_activated)
        options: dict[str, Any] = {
            "ACTIVATION": self._activation,
            "HAS_SCALE": scale is not None,
            "HAS_BIAS": bias is not None,
            "HAS_RESIDUAL": residual is not None,
            "GATED": gated,
            **launch_options(x),
        }
        if rows == 1 and not self.batch_invariant and weight.dtype in (x.dtype, torch.int8):
            tile = _ONE_ROW[self._item_bytes]
            native = x.is_cuda and torch.version.cuda is not None
            grid: Any = (triton.cdiv(outputs, tile["OUTPUTS"]),)
            lines = 0
            if native and scale is None:
                room = _PROGRAMS_AT_ONCE * multiprocessors(x.device) // grid[0]
                lines = _LINES_AHEAD if room else 0
                tile = _larger(tile, min(room, inputs // tile["INPUTS"], _LARGEST_PROGRAM))
            ahead = {"LINES": lines, "LINE": _LINE_BYTES // self._item_bytes, "NATIVE": native}
            _one_row[grid](x, *pointers, *sizes, **ahead, **tile, **options)
            return y
        rounded, row_scale = (x, x) if scale is None else round_rows(x, weight.dtype)
        padded = min(max(_LEAST_ROWS, triton.next_power_of_2(rows)), _MOST_TILE_ROWS)
        digits = 1 if scale is None else len(rounded)
        tile = _tile(rows, outputs, self._item_bytes, batch_invariant=self.batch_invariant)
        if x.is_cuda:
            # Bytes of shared memory for one of the inputs read at once.
            read = tile["OUTPUTS"] * self._item_bytes + padded * digits * rounded.dtype.itemsize
            stages = shared_bytes(x.device) // (tile["INPUTS"] * read)
            tile["num_stages"] = max(min(tile["num_stages"], stages), 1)
        grid = (triton.cdiv(outputs, tile["OUTPUTS"]), tile["PARTS"], triton.cdiv(rows, padded))
        shared = (row_scale, x, x)  # not read by programs that share no inputs
        if tile["PARTS"] > 1:
            parts = x.new_empty(tile["PARTS"], rows, outputs, dtype=torch.float32)
            shared = (row_scale, parts, _tickets(x.device))
        _some_rows[grid](
            *(rounded, *pointers, *shared, rows, rounded.stride(-2), *sizes),
            ROWS=padded,
            DIGITS=digits,
            **tile,
            **options,
        )
        return y

    def _by_library(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Return activation(x W + bias) + residual by cuBLAS, for `weight` (O, I) in the type of x.

        It applies the usual activations within the product: 12,288 rows of 768 to 3072 outputs with
        gelu take 104 us on an H200 so, 137 us with a kernel for it. A residual is overwritten by
        the product that adds it: 8192 rows of 4096 to 4096 outputs take 424 us so, 461 us with a
        kernel.
        """
        after, bias = self.epilogue, self.epilogue.bias
        if residual is None:
            within = after.activation in ("gelu_tanh", "relu")
            if within and bias is not None and not (after.first_activated or after.gated):
                use_gelu = after.activation == "gelu_tanh"
                return torch._addmm_activation(bias, x, weight.t(), use_gelu=use_gelu)
        elif bias is None and after.activation is None and residual.is_contiguous():
            return residual.addmm_(x, weight.t())
        return self._finished(functional.linear(x, weight, bias), residual)

    def _finished(self, y: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return activation(y) + residual in one kernel, in the place of contiguous rows y (N, O).

        Of gated pairs it is activation(gate) * linear, (N, O/2), in a place of its own.
        """
        if self.epilogue.activation is None and residual is None:
            return y
        rows, outputs = y.shape
        options = {"ACTIVATION": self._activation, **_FINISHED, **launch_options(y)}
        if self.epilogue.gated:
            mixed = y.new_empty(rows, outputs // 2)
            count = mixed.numel()
            _gate_pairs[(triton.cdiv(count, _FINISHED["OUTPUTS"]),)](y, mixed, count, **options)
            return mixed
        first_activated = self.epilogue.first_activated
        if not first_activated:  # all rows are alike: one long one
            rows, outputs = 1, rows * outputs
        first = first_activated if residual is None else 0
        _finish_rows[(rows * triton.cdiv(outputs - first, _FINISHED["OUTPUTS"]),)](
            *(y, y if residual is None else residual.contiguous(), outputs, first, first_activated),
            HAS_RESIDUAL=residual is not None,
            **options,
        )
        return y
