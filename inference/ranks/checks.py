"""Checks before loading: the model divides among the ranks, and each rank has a device."""

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

_LEAST_TRITON = (3, 4)  # whose kernels take records


def check_ranks(
    architecture: Architecture, placement: Placement, *, needed_devices: int | None = None
) -> Placement:
    """Return a checked placement, in which `auto` is replaced by the device.

    `needed_devices` is the number of GPUs that this process must see; None means one for each rank.

    Raises:
        ValueError: with every problem found.
    """
    problems = []
    if placement.data_type not in WEIGHT_DATA_TYPES:
        types = ", ".join(WEIGHT_DATA_TYPES)
        problems.append(f"data_type={placement.data_type!r} must be one of {types}")
    if placement.kv_cache_dtype not in KV_CACHE_DTYPES:
        types = ", ".join(KV_CACHE_DTYPES)
        problems.append(f"kv_cache_dtype={placement.kv_cache_dtype!r} must be one of {types}")
    sizes = {"tensor_para_size": placement.tp_size, "pipeline_para_size": placement.pp_size}
    wrong = [f"{name}={size} must be at least 1" for name, size in sizes.items() if size < 1]
    problems += wrong
    if not wrong:
        layout = ParallelLayout(0, placement.tp_size, placement.pp_size)
        depths = {architecture.num_layer}
        if isinstance(architecture, EncoderDecoderArchitecture):
            depths.add(architecture.decoder_num_layer)
        problems += _problems(partial(check_architecture, architecture, layout.tp_size))
        for depth in depths:
            problems += _problems(partial(layout.layers, depth))
    device, device_problems = _device(placement.device, needed_devices or placement.world_size)
    problems += device_problems
    problems += _matrix_problems(architecture, placement, device)
    if problems:
        raise ValueError("\n".join(problems))
    return replace(placement, device=device)


def _matrix_problems(architecture: Architecture, placement: Placement, device: str) -> list[str]:
    int8_mode, found = placement.int8_mode, []
    if int8_mode not in (0, 1):
        found.append(f"int8_mode={int8_mode} is not supported; use 0, or 1 for weights of 8 bits")
    if int8_mode == 1 and isinstance(architecture, EncoderArchitecture):
        found.append("int8_mode=1 is not supported for BERT; use 0")
    if int8_mode and placement.fp8:
        found.append("int8_mode=1 and fp8=1 are two forms of the same matrices; set one of them")
    if placement.fp8 and isinstance(architecture, EncoderArchitecture):
        found.append("fp8=1 is not supported for BERT; use 0")
    if placement.batch_invariant and not isinstance(architecture, DecoderArchitecture):
        found.append("batch_invariant=1 is for decoder-only models; use 0")
    in_16_bits = device == "cuda" and placement.data_type in ("fp16", "bf16")
    found += [
        f"{name}=1 needs a GPU and data_type fp16 or bf16; the device is {device}, and "
        f"data_type={placement.data_type}"
        for name in ("fp8", "batch_invariant")
        if getattr(placement, name) and not in_16_bits
    ]
    if placement.kv_cache_dtype != "auto" and isinstance(architecture, EncoderArchitecture):
        found.append(f"kv_cache_dtype={placement.kv_cache_dtype}: BERT has no cache; use auto")
    in_fp8 = {
        "fp8=1": (placement.fp8 and in_16_bits, "int8_mode=1"),
        f"kv_cache_dtype={placement.kv_cache_dtype}": (
            placement.kv_cache_dtype != "auto" and device == "cuda",
            "auto",
        ),
    }
    found += [
        f"{name} needs a GPU of compute capability 8.9 or more (Ada, Hopper); use {other}"
        for name, (is_set, other) in in_fp8.items()
        if is_set and torch.cuda.get_device_capability() < (8, 9)
    ]
    return found


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
    if found == "none" or tuple(map(int, found.split(".")[:2])) < _LEAST_TRITON:
        least = ".".join(map(str, _LEAST_TRITON))
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
