"""Products of few rows on a GPU, fused with bias, activation and residual, in Triton.

Decoding reads every weight once per token, so that these products are bound by memory. Of the 4.4
TB/s of an H200, one row reaches 4.1 to 4.3 with GPT-J-6B's matrices in fp16 (cuBLAS 2.6 to 4.2,
plus kernels for bias, activation and residual), and 3.1 to 4.1 in 8 bits. Batch-invariant products
of any number of rows use the same kernel. Import this module only where Triton is installed.
"""

# Shapes: N rows, I inputs, O outputs

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from inference.parallel.epilogue import Epilogue, GemmOptions
from inference.parallel.int8 import FP8_GROUP, ScaledWeight, Weight, quantise
from inference.parallel.launch_cuda import (
    is_native,
    launch_options,
    let_next_begin,
    multiprocessors,
    read_ahead,
    shared_bytes,
    wait_for_earlier,
)
from inference.parallel.rounding_cuda import (
    ACTIVATIONS,
    FEW_ROWS,
    FP8,
    RoundedRows,
    activated,
    finished_values,
    round_rows,
    widen,
    widened,
)

# Tiles for one row, by the bytes of a weight. The number of bytes in flight per multiprocessor
# counts: in 16 bits 8 programs (which 64 registers allow) with 8 KB each. Of twelve tiles this is
# the best, or close to it, for all of GPT-J-6B's matrices. In 8 bits, summing 16 neighbours at once
# leaves registers for 16 programs: 3.1 to 4.1 TB/s, without it 2.8 to 3.6.
_ONE_ROW: dict[int, dict[str, int]] = {
    2: {"OUTPUTS": 4, "INPUTS": 1024, "GROUP": 1, "num_warps": 4, "maxnreg": 64},
    1: {"OUTPUTS": 4, "INPUTS": 2048, "GROUP": 16, "num_warps": 2},
}
# Cache lines per row of weights that a program prefetches beyond its first tile before it waits, in
# 16 bits and if all programs run at once. A step of GPT-J-6B takes 3.18 ms without prefetching,
# 2.97 ms with 32 lines. Products with more programs, and in 8 bits, would get slower.
_LINES_AHEAD = 32
_LINE_BYTES = 128
_PROGRAMS_AT_ONCE = 8  # per multiprocessor
# With fewer programs, each reads up to so many times as much at once. A step of GPT-2 350M takes
# 0.46 ms with this and attention that reads the cache early, 0.64 ms without either.
_LARGEST_PROGRAM = 4

Rows = torch.Tensor | RoundedRows  # (N, I), inputs of a product

# Rows of a tile; eight would take as long as 16.
_LEAST_ROWS, _MOST_TILE_ROWS = 16, 128
_LEAST_ROWS_OF_A_WARP_GROUP = 64
# With more rows cuBLAS is faster (even though it needs int8 weights widened first), by the bytes of
# a weight.
_MOST_ROWS = {2: 32, 1: 128}
# The same for rows in FP8, for fewer outputs than twice `_MANY_OUTPUTS`, and for more: gates with
# 4096 inputs and 28,672 outputs take 34 us for 64 rows (libraries 39), 48 (39) for 128.
_MOST_ROUNDED = (128, 64)
# With so many outputs, programs fill a GPU without splitting the inputs (split-K). With fewer they
# split them, in 8 bits into as many parts as give about `_PROGRAMS_OF_8_BITS` programs.
_MANY_OUTPUTS = 6144
_PROGRAMS_OF_8_BITS, _MOST_PARTS = 800, 8
_TICKETS = 512  # at least the output tiles of any product whose inputs are split

# Outputs per program of the epilogue after a product by cuBLAS.
_FINISHED = {"OUTPUTS": 2048, "num_warps": 4}


@triton.jit
def _of_outputs(at, output, inside, ABSENT: tl.constexpr):
    """Return a value for each output, ABSENT if `at` is None."""
    value = ABSENT
    if at is not None:
        value = tl.load(at + output, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _store_finished(
    y,
    scale,
    bias,
    residual,
    y_at,
    row,
    rows,
    outputs,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,  # whether outputs are pairs of a gate and another value
    NATIVE: tl.constexpr,
):
    """Store activation(y * scale + bias) + residual of sums y (OUTPUTS, ROWS).

    With GATED it is activation(gate) * other for each pair.
    """
    y = y * scale + bias
    STORED: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    width = outputs // 2 if GATED else outputs
    if GATED:
        gate, other = tl.split(tl.permute(tl.reshape(y, (STORED, 2, ROWS)), (0, 2, 1)))
        y = activated(gate, ACTIVATION, NATIVE) * other
    else:
        y = activated(y, ACTIVATION, NATIVE) + residual
    output = tl.program_id(0) * STORED + tl.arange(0, STORED)[:, None]
    inside = (output < width) & (row < rows)[None, :]
    at = y_at + row[None, :].to(tl.int64) * width + output
    tl.store(at, y.to(y_at.dtype.element_ty), mask=inside)


@triton.jit
def _weights(row_at, place, inputs):
    """Return a tile (OUTPUTS, INPUTS) of weights, which are read only once, unlike the inputs."""
    inside = (place < inputs)[None, :]
    return tl.load(row_at + place[None, :], mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _partial_sums(
    weight,
    x_at,
    first,
    inputs,
    scale_at,
    output,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Return (OUTPUTS, INPUTS / GROUP) sums of a tile's products with the row.

    With SCALED, an output has one scale per SCALED inputs, a multiple of GROUP.
    """
    place = first + tl.arange(0, INPUTS)
    x = tl.load(x_at + place, mask=place < inputs, other=0.0).to(tl.float32)
    products = widened(weight, NATIVE).to(tl.float32) * x[None, :]
    if GROUP > 1:
        products = tl.sum(tl.reshape(products, (OUTPUTS, INPUTS // GROUP, GROUP)), 2)
    if SCALED > 0:
        each = ((first + tl.arange(0, INPUTS // GROUP) * GROUP) // SCALED)[None, :]
        groups = tl.cdiv(inputs, SCALED)
        products *= tl.load(scale_at + output * groups + each, mask=each < groups, other=0.0)
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
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,  # cache lines to prefetch
    LINE: tl.constexpr,  # weights in a line
    SCALED: tl.constexpr,  # inputs per scale, 0 for all
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    inside = output < outputs
    row_at = weight_at + tl.minimum(output, outputs - 1).to(tl.int64) * inputs
    place = tl.arange(0, INPUTS)
    weight = _weights(row_at, place, inputs)
    if LINES > 0:
        ahead = tl.minimum(INPUTS + tl.arange(0, LINES) * LINE, inputs - 1)
        read_ahead(row_at + ahead[None, :])
    scale = _of_outputs(None if SCALED > 0 else scale_at, output, inside, 1.0)
    bias = _of_outputs(bias_at, output, inside, 0.0)
    row_of = tl.minimum(output, outputs - 1)  # of scales
    wait_for_earlier(EARLY)
    residual = _of_outputs(residual_at, output, inside, 0.0)
    total = _partial_sums(
        weight, x_at, 0, inputs, scale_at, row_of, OUTPUTS, INPUTS, GROUP, SCALED, NATIVE
    )
    for first in range(INPUTS, inputs, INPUTS):
        weight = _weights(row_at, first + tl.arange(0, INPUTS), inputs)
        total += _partial_sums(
            weight, x_at, first, inputs, scale_at, row_of, OUTPUTS, INPUTS, GROUP, SCALED, NATIVE
        )
    y = tl.sum(total, 1)[:, None]
    _store_finished(
        *(y, scale, bias, residual, y_at, tl.arange(0, 1), 1, outputs),
        *(OUTPUTS, 1, ACTIVATION, GATED, NATIVE),
    )


@triton.jit(do_not_specialize=["rows"])
def _some_rows(
    x_at,
    weight_at,
    scale_at,
    bias_at,
    residual_at,
    row_scale_at,  # of rows in FP8
    y_at,
    parts_at,
    tickets_at,
    rows,
    x_stride,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,  # programs among which an output's inputs are split
    SCALED: tl.constexpr,  # inputs per scale, 0 for all
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row_at = weight_at + tl.minimum(output, outputs - 1)[:, None].to(tl.int64) * inputs
    x_at += row[None, :].to(tl.int64) * x_stride
    share = tl.cdiv(tl.cdiv(inputs, INPUTS), PARTS) * INPUTS
    begin = tl.program_id(1) * share
    wait_for_earlier(EARLY)
    # Tensor cores read widened weights from shared memory in 32 bits at once as the second operand,
    # in 16 as the first.
    NARROW: tl.constexpr = scale_at is not None and row_scale_at is None
    total = tl.zeros((ROWS, OUTPUTS) if NARROW else (OUTPUTS, ROWS), tl.float32)
    for first in range(begin, tl.minimum(begin + share, inputs), INPUTS):
        place = first + tl.arange(0, INPUTS)
        weight = _weights(row_at, place, inputs)
        there = (row < rows)[None, :] & (place < inputs)[:, None]
        x = tl.load(x_at + place[:, None], mask=there, other=0.0)
        if NARROW:
            weight = widened(weight, NATIVE).to(x.dtype)
            if SCALED > 0:
                groups = tl.cdiv(inputs, SCALED)
                at = scale_at + tl.minimum(output, outputs - 1) * groups + first // SCALED
                total += tl.dot(tl.trans(x), tl.trans(weight)) * tl.load(at)[None, :]
            else:
                total = tl.dot(tl.trans(x), tl.trans(weight), total)
        else:
            total = tl.dot(weight, x, total)
    if NARROW:
        total = tl.trans(total)
    output = output[:, None]
    place = row[None, :].to(tl.int64) * outputs + output
    inside = (output < outputs) & (row < rows)[None, :]
    last = True
    if PARTS > 1:
        # The last program to finish adds up all parts, always in the same order.
        size = rows.to(tl.int64) * outputs
        tl.store(parts_at + tl.program_id(1) * size + place, total, mask=inside)
        tl.debug_barrier()  # this program's parts are all stored before it draws its ticket
        ticket_at = tickets_at + tl.program_id(0)  # all rows are in one tile
        last = tl.atomic_add(ticket_at, 1) == PARTS - 1
        if last:
            tl.store(ticket_at, 0)
            total = tl.zeros((OUTPUTS, ROWS), tl.float32)
            for part in range(PARTS):
                at = parts_at + part * size + place
                total += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    if last:
        scale = _of_outputs(None if SCALED > 0 else scale_at, output, inside, 1.0)
        scale *= _of_outputs(row_scale_at, row[None, :], (row < rows)[None, :], 1.0)
        bias = _of_outputs(bias_at, output, inside, 0.0)
        residual = _of_outputs(residual_at, place, inside, 0.0)
        _store_finished(
            *(total, scale, bias, residual, y_at, row, rows, outputs),
            *(OUTPUTS, ROWS, ACTIVATION, GATED, NATIVE),
        )


def _tile(rows: int, outputs: int, item_bytes: int, *, batch_invariant: bool) -> dict[str, int]:
    """Return the tile for a product of several rows.

    In 16 bits it is the best of twelve on an H200, or close to it, for GPT-J-6B's two products of a
    layer and one of 4096 by 4096. For 16 and 32 rows the two take 98 and 101 us, epilogue included
    (cuBLAS 107 and 102 without it). In 8 bits the same holds for the four products of Llama 8B.
    """
    many = outputs >= _MANY_OUTPUTS
    if batch_invariant or rows > _MOST_TILE_ROWS:  # one order of summation for any number of rows
        return {"OUTPUTS": 64, "INPUTS": 128, "PARTS": 1, "num_stages": 4, "num_warps": 4}
    if item_bytes == 1 and rows <= 2 * _LEAST_ROWS:
        programs = _PROGRAMS_OF_8_BITS // (1 + (rows > _LEAST_ROWS))
        parts = min(max(programs * 64 // outputs, 1), _MOST_PARTS)
        parts = 1 << (parts.bit_length() - 1)
        return {"OUTPUTS": 64, "INPUTS": 256, "PARTS": parts, "num_stages": 3, "num_warps": 4}
    if item_bytes == 1 and many:
        return {"OUTPUTS": 128, "INPUTS": 128, "PARTS": 1, "num_stages": 4, "num_warps": 8}
    parts = 1 if many else 4
    return {"OUTPUTS": 64, "INPUTS": 128, "PARTS": parts, "num_stages": 4, "num_warps": 4}


def _rounded_tile(outputs: int) -> dict[str, int]:
    """Return the tile for a product of several rows in FP8.

    It is the best of 15 on an H200, or close to it, for Mistral 7B's four products, which together
    take 74 us for 32 or 64 rows (libraries 106) and 96 for 128 rows (106).
    """
    if outputs >= _MANY_OUTPUTS:
        return {"OUTPUTS": 64, "INPUTS": 128, "PARTS": 1, "num_stages": 6, "num_warps": 4}
    return {"OUTPUTS": 64, "INPUTS": 256, "PARTS": 2, "num_stages": 4, "num_warps": 4}


@cache
def fp8_result(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type in which torch computes FP8 products with row scales: `dtype`, or bf16.

    cuBLAS supports these scales from CUDA 12.9 on, only on Hopper. Otherwise torch uses CUTLASS,
    for which some releases refuse fp16, and others write the bits of bf16 instead.
    """
    one = torch.eye(16, dtype=FP8, device=device)
    scale = torch.ones(16, 1, device=device)
    try:
        y = torch._scaled_mm(one, one.t(), scale_a=scale, scale_b=scale.t(), out_dtype=dtype)
    except (RuntimeError, ValueError):
        return torch.bfloat16
    return dtype if y.equal(one.to(dtype)) else torch.bfloat16


@cache
def _tickets(device: torch.device) -> torch.Tensor:
    """Return zeroed counters, one for each output tile of a product whose inputs are split."""
    return torch.zeros(_TICKETS, dtype=torch.int32, device=device)


@triton.jit
def _finish(
    x_at,
    residual_at,
    y_at,
    count,
    OUTPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    first = tl.program_id(0).to(tl.int64) * OUTPUTS
    place = first + tl.arange(0, OUTPUTS)
    wait_for_earlier(EARLY)
    y = finished_values(x_at, first, count, OUTPUTS, ACTIVATION, GATED, NATIVE)
    y += _of_outputs(residual_at, place, place < count, 0.0)
    tl.store(y_at + place, y.to(y_at.dtype.element_ty), mask=place < count)


def _larger(tile: dict[str, int], times: int) -> dict[str, int]:
    """Return the tile with inputs and warps times the largest power of two up to `times`."""
    times = 1 << max(times.bit_length() - 1, 0)
    return tile | {name: times * tile[name] for name in ("INPUTS", "num_warps")}


class CudaGemm:
    """A product in 16 bits, by the kernels above for few rows, by libraries for more.

    Weights may have 8 bits. The kernels widen them as they read them. For libraries, int8 weights
    are widened to the type of x first, and FP8 weights are multiplied with rows of x in FP8.
    """

    def __init__(self, weight: Weight, epilogue: Epilogue, options: GemmOptions) -> None:
        """Store `weight` (I, O), or its 8-bit copy, as (O, I), which is as fast for cuBLAS."""
        self.scale: torch.Tensor | None = None
        self._group = 0  # inputs per scale if outputs have several scales
        if isinstance(weight, ScaledWeight):
            self.weight = weight.values.view(torch.uint8).t().contiguous().view(FP8)
            self.scale = weight.scale.t().contiguous().squeeze(1)
            self._group = weight.group if self.scale.ndim == 2 else 0
        elif options.int8 or options.fp8:
            self.weight, self.scale = quantise(weight, torch.int8 if options.int8 else FP8)
        else:
            self.weight = weight.t().contiguous()
        self.epilogue = epilogue
        self.batch_invariant = options.batch_invariant
        # Only weights with one scale per output are multiplied with rounded rows.
        self._is_fp8 = self.weight.dtype == FP8 and not self._group
        # FP8 products of libraries need multiples of 16.
        libraries_cannot = self._is_fp8 and any(size % 16 for size in self.weight.shape)
        self._all_rows = options.batch_invariant or libraries_cannot
        self._item_bytes = self.weight.dtype.itemsize
        self._few_rows = FEW_ROWS if self._is_fp8 else _MOST_ROWS[self._item_bytes]
        self._activation = ACTIVATIONS[epilogue.activation]
        if not self._all_rows and self._is_fp8:
            self._result = fp8_result(weight.dtype, weight.device)

    def __call__(self, x: Rows, residual: torch.Tensor | None = None) -> Any:
        """Return activation(x W + bias) + residual in the type of x.

        For many rows in FP8, the result is `RoundedRows` if the epilogue `rounds`.
        """
        if len(x) <= self._few_rows or self._all_rows:
            return self._fused(x.widened() if isinstance(x, RoundedRows) else x, residual)
        if self._is_fp8:
            x = x if isinstance(x, RoundedRows) else round_rows(x)
            if len(x) > _MOST_ROUNDED[len(self.weight) >= 2 * _MANY_OUTPUTS]:
                return self._in_fp8(x, residual)
            y = self._fused(x, residual)
            return round_rows(y) if self.epilogue.rounds else y
        assert isinstance(x, torch.Tensor)
        weight = self.weight
        if self.scale is not None:
            weight = widen(weight, self.scale, x.dtype, group=self._group)
        return self._by_library(x, weight, residual)

    def _in_fp8(self, x: RoundedRows, residual: torch.Tensor | None) -> Rows:
        assert self.scale is not None
        bias = self.epilogue.bias
        y = torch._scaled_mm(
            x.digits,
            self.weight.t(),
            scale_a=x.scale.unsqueeze(1),
            scale_b=self.scale.unsqueeze(0),
            out_dtype=self._result,
            use_fast_accum=True,  # 12 % faster; its error is a tenth of the rounding's
        ).to(x.dtype)
        y = y if bias is None else y.add_(bias)
        return round_rows(y, self.epilogue) if self.epilogue.rounds else self._finished(y, residual)

    def _fused(self, x: Rows, residual: torch.Tensor | None) -> torch.Tensor:
        """Return activation(x W + bias) + residual, computed by `_one_row` or `_some_rows`."""
        dtype: torch.dtype = x.dtype
        row_scale: torch.Tensor | None = None
        if isinstance(x, RoundedRows):
            row_scale, x = x.scale, x.digits
        (rows, inputs), (weight, scale) = x.shape, (self.weight, self.scale)
        outputs, gated = len(weight), self.epilogue.gated
        x = x if x.stride(1) == 1 else x.contiguous()
        y = x.new_empty(rows, outputs // 2 if gated else outputs, dtype=dtype)
        residual = None if residual is None else residual.contiguous()
        pointers = (weight, scale, self.epilogue.bias, residual)
        sizes = (outputs, inputs)
        native = is_native(x)
        options: dict[str, Any] = {
            "ACTIVATION": self._activation,
            "GATED": gated,
            "NATIVE": native,
            "SCALED": self._group,
            **launch_options(x),
        }
        if rows == 1 and not self.batch_invariant:
            tile = _ONE_ROW[self._item_bytes]
            grid: Any = (triton.cdiv(outputs, tile["OUTPUTS"]),)
            lines = 0
            if native and scale is None:
                room = _PROGRAMS_AT_ONCE * multiprocessors(x.device) // grid[0]
                lines = _LINES_AHEAD if room else 0
                tile = _larger(tile, min(room, inputs // tile["INPUTS"], _LARGEST_PROGRAM))
            ahead = {"LINES": lines, "LINE": _LINE_BYTES // self._item_bytes}
            _one_row[grid](x, *pointers, y, *sizes, **ahead, **tile, **options)
            return y
        padded = min(max(_LEAST_ROWS, triton.next_power_of_2(rows)), _MOST_TILE_ROWS)
        if self.batch_invariant and scale is not None:  # fewer rows would use other instructions
            padded = _LEAST_ROWS_OF_A_WARP_GROUP
        tile = _tile(rows, outputs, self._item_bytes, batch_invariant=self.batch_invariant)
        if row_scale is not None:
            tile = _rounded_tile(outputs)
        if self._group:
            more = tile["INPUTS"] // FP8_GROUP
            tile |= {"INPUTS": FP8_GROUP, "num_stages": more * tile["num_stages"]}
        if x.is_cuda:
            # Bytes of shared memory per input of a stage.
            read = tile["OUTPUTS"] * self._item_bytes + padded * x.dtype.itemsize
            stages = shared_bytes(x.device) // (tile["INPUTS"] * read)
            tile["num_stages"] = max(min(tile["num_stages"], stages), 1)
        grid = (triton.cdiv(outputs, tile["OUTPUTS"]), tile["PARTS"], triton.cdiv(rows, padded))
        shared: tuple[torch.Tensor | None, ...] = (None, None)
        if tile["PARTS"] > 1:
            parts = x.new_empty(tile["PARTS"], rows, outputs, dtype=torch.float32)
            shared = (parts, _tickets(x.device))
            assert grid[0] <= _TICKETS, "the kernel would write beyond the tickets"
        _some_rows[grid](
            *(x, *pointers, row_scale, y, *shared, rows, x.stride(0), *sizes),
            ROWS=padded,
            **tile,
            **options,
        )
        return y

    def _by_library(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Return activation(x W + bias) + residual by cuBLAS, for `weight` (O, I) in the type of x.

        cuBLAS applies common activations itself: 12,288 rows of 768 to 3072 outputs with gelu take
        104 us on an H200, 137 us with a separate kernel. It also adds the residual in place: 8192
        rows of 4096 to 4096 outputs take 424 us, 461 us with a separate kernel.
        """
        after, bias = self.epilogue, self.epilogue.bias
        if residual is None:
            within = after.activation in ("gelu_tanh", "relu")
            if within and bias is not None and not after.gated:
                use_gelu = after.activation == "gelu_tanh"
                return torch._addmm_activation(bias, x, weight.t(), use_gelu=use_gelu)
        elif bias is None and after.activation is None and residual.is_contiguous():
            return residual.addmm_(x, weight.t())
        return self._finished(functional.linear(x, weight, bias), residual)

    def _finished(self, y: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return activation(y) + residual in one kernel, which overwrites contiguous y (N, O).

        For gated pairs the result activation(gate) * linear, (N, O/2), is a new tensor.
        """
        if self.epilogue.activation is None and residual is None:
            return y
        gated, out = self.epilogue.gated, y
        if gated:
            out = y.new_empty(len(y), y.shape[1] // 2)
        _finish[(triton.cdiv(out.numel(), _FINISHED["OUTPUTS"]),)](
            *(y, None if residual is None else residual.contiguous(), out, out.numel()),
            ACTIVATION=self._activation,
            GATED=gated,
            NATIVE=is_native(y),
            **_FINISHED,
            **launch_options(y),
        )
        return out
