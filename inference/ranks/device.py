"""The device of a rank, and the types in which it computes and keeps matrices."""

import logging
import socket

import torch

from export_scripts.numeric.dtypes import torch_dtype
from inference.parallel.gemm_cpu import has_fp16_weights, has_onednn
from inference.parallel.native_cpu import has_native
from inference.ranks.settings import RankSettings

logger = logging.getLogger(__name__)


def rank_device(settings: RankSettings) -> torch.device:
    """Return the device of a rank; on CUDA each rank of a node takes one GPU.

    Raises:
        ValueError: No GPU is visible in this process, which may run on another node than rank 0.
    """
    if settings.device == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if not visible:
        raise ValueError(
            f"device=cuda, and {socket.gethostname()} has no visible GPU; check "
            "CUDA_VISIBLE_DEVICES and the driver there, or set device=cpu"
        )
    place = settings.rank if settings.device_index is None else settings.device_index
    return torch.device("cuda", (settings.first_device + place) % visible)


def has_row_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether an encoder uses our own kernels, and graphs: in 16 bits on a GPU."""
    return device.type == "cuda" and dtype.itemsize == 2


def compute_dtype(data_type: str, device: torch.device) -> torch.dtype:
    """Return the type in which a rank computes.

    A CPU computes types for which it has no fast matrix products in fp32: fp16, and often bf16.
    """
    dtype = torch_dtype(data_type)
    if device.type == "cuda" or dtype == torch.float32:
        return dtype
    if dtype == torch.bfloat16 and has_onednn(dtype):
        return dtype
    logger.warning("data_type=%s: this CPU computes it in fp32", data_type)
    return torch.float32


def matrix_dtype(data_type: str, stored: str, device: torch.device) -> torch.dtype | None:
    """Return the type of a rank's matrices in memory, None for the type in which it computes.

    For fp32 computation, 16-bit matrices are kept if a product can widen them as it reads them: the
    results are the same, and half the bytes are read.
    """
    wanted = stored if data_type == "fp32" else data_type
    if device.type == "cpu" and wanted == "fp16" and has_fp16_weights():
        return torch.float16
    if device.type == "cpu" and wanted == "bf16" and has_native(torch.bfloat16, 1):
        return torch.bfloat16
    return None
