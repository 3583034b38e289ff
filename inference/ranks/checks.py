"""Checks before loading: the model can be divided among the ranks, and each rank has a device."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from export_scripts.families.layout.architecture import (
    Architecture,
    DecoderArchitecture,
    EncoderArchitecture,
    EncoderDecoderArchitecture,
)
from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES
from inference.model.weights import check_architecture
from inference.parallel.layout import ParallelLayout
from inference.ranks.settings import KV_CACHE_DTYPES, Placement

_MIN_TRITON = (3, 4)  # earlier kernels cannot take named tuples


def check_ranks(
    architecture: Architecture, placement: Placement, *, needed_devices: int | None = None
) -> Placement:
    """Return the checked placement, with `auto` resolved to a device.

    `needed_devices` is the number of GPUs that this process must see; None means one per rank.

    Raises:
        ValueError: With every problem found.
    """
    device, problems = _device(placement.device, needed_devices or placement.world_size)
    checked = _checked(architecture, placement, device)
    problems = [text for text, applies in checked.items() if applies] + problems
    if placement.tp_size >= 1 and placement.pp_size >= 1:
        layout = ParallelLayout(0, placement.tp_size, placement.pp_size)
        depths = {architecture.num_layer}
        if isinstance(architecture, EncoderDecoderArchitecture):
            depths.add(architecture.decoder_num_layer)
        problems += _problems(partial(check_architecture, architecture, layout.tp_size))
        for depth in depths:
            problems += _problems(partial(layout.layers, depth))
    if problems:
        raise ValueError("\n".join(problems))
    return replace(placement, device=device)


def _checked(architecture: Architecture, placement: Placement, device: str) -> dict[str, bool]:
    """Return the possible problems of a placement, and whether each applies."""
    p, on_gpu = placement, device == "cuda"
    is_bert = isinstance(architecture, EncoderArchitecture)
    in_16_bits = on_gpu and p.data_type in ("fp16", "bf16")
    lacks_16_bits = f"needs a GPU and data_type fp16 or bf16; the device is {device}, and"
    fp8_cache = p.kv_cache_dtype != "auto"
    lacks_fp8 = False
    if on_gpu and (fp8_cache or (p.fp8 and in_16_bits)):
        lacks_fp8 = torch.cuda.get_device_capability() < (8, 9)
    too_old = "needs a GPU of compute capability 8.9 or more (Ada, Hopper); use"
    types, cache_types = ", ".join(WEIGHT_DATA_TYPES), ", ".join(KV_CACHE_DTYPES)
    return {
        f"data_type={p.data_type!r} must be one of {types}": p.data_type not in WEIGHT_DATA_TYPES,
        f"kv_cache_dtype={p.kv_cache_dtype!r} must be one of {cache_types}": (
            p.kv_cache_dtype not in KV_CACHE_DTYPES
        ),
        f"tensor_para_size={p.tp_size} must be at least 1": p.tp_size < 1,
        f"pipeline_para_size={p.pp_size} must be at least 1": p.pp_size < 1,
        f"int8_mode={p.int8_mode} is not supported; use 0, or 1 for weights of 8 bits": (
            p.int8_mode not in (0, 1)
        ),
        "int8_mode=1 is not supported for BERT; use 0": p.int8_mode == 1 and is_bert,
        "int8_mode=1 and fp8=1 are two forms of the same matrices; set one of them": (
            p.int8_mode != 0 and p.fp8
        ),
        "fp8=1 is not supported for BERT; use 0": p.fp8 and is_bert,
        "batch_invariant=1 is for decoder-only models; use 0": (
            p.batch_invariant and not isinstance(architecture, DecoderArchitecture)
        ),
        f"fp8=1 {lacks_16_bits} data_type={p.data_type}": p.fp8 and not in_16_bits,
        f"batch_invariant=1 {lacks_16_bits} data_type={p.data_type}": (
            p.batch_invariant and not in_16_bits
        ),
        f"kv_cache_dtype={p.kv_cache_dtype}: BERT has no cache; use auto": fp8_cache and is_bert,
        f"fp8=1 {too_old} int8_mode=1": lacks_fp8 and p.fp8 and in_16_bits,
        f"kv_cache_dtype={p.kv_cache_dtype} {too_old} auto": lacks_fp8 and fp8_cache,
    }


def _problems(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except ValueError as error:
        return [str(error)]
    return []


def _device(device: str, ranks: int) -> tuple[str, list[str]]:
    if device not in ("auto", "cpu", "cuda"):
        return "cpu", [f"device={device!r} must be auto, cpu or cuda"]
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu", []
    visible = torch.cuda.device_count()
    if ranks > visible:
        return "cuda", [
            f"tensor_para_size * pipeline_para_size = {ranks} ranks need as many GPUs, "
            f"{visible} are visible; change the sizes or CUDA_VISIBLE_DEVICES, or set device=cpu"
        ]
    found = _triton_version()
    if found == "none" or tuple(map(int, found.split(".")[:2])) < _MIN_TRITON:
        least = ".".join(map(str, _MIN_TRITON))
        return "cuda", [
            f"device=cuda needs Triton {least} or later, which comes with torch 2.8 and later; "
            f"installed is {found}. Upgrade torch, or set device=cpu"
        ]
    return "cuda", []


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)
