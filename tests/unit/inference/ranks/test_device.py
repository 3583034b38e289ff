"""The device of a rank, and the type its matrices are kept in."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from export_scripts.ft.config_ini import read_config
from inference.parallel.gemm_cpu import has_fp16_weights
from inference.parallel.native_cpu import has_native
from inference.ranks.checks import check_ranks
from inference.ranks.device import matrix_dtype, rank_device
from inference.ranks.settings import Placement, RankSettings
from tests.ft_folders import write_gpt


def settings(**values: Any) -> RankSettings:
    return RankSettings(ft_dir="/weights", slots=1, max_len=8, threads=1, device="cuda", **values)


@pytest.mark.parametrize(("rank", "device_index", "expected"), [(3, None, 1), (3, 0, 0)])
def test_the_ranks_of_a_node_take_a_gpu_each(rank, device_index, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = rank_device(settings(rank=rank, tp_size=4, device_index=device_index))
    assert device == torch.device("cuda", expected)


def test_a_node_without_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"device=cuda, and .* has no visible GPU; check CUDA_VIS"):
        rank_device(settings(rank=0))


@pytest.mark.parametrize(
    ("version", "is_refused"), [(None, True), ("3.3.1", True), ("3.4.0", False), ("3.10", False)]
)
def test_a_gpu_needs_the_triton_of_its_kernels(version, is_refused, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    module = None if version is None else SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "triton", module)
    architecture = read_config(write_gpt(tmp_path))[1].architecture()
    placement = Placement(device="cuda", data_type="fp32")
    if not is_refused:
        assert check_ranks(architecture, placement).device == "cuda"
        return
    with pytest.raises(ValueError, match=f"installed is {version or 'none'}"):
        check_ranks(architecture, placement)


BF16 = torch.bfloat16 if has_native(torch.bfloat16, 1) else None


@pytest.mark.skipif(not has_fp16_weights(), reason="this torch lacks FBGEMM")
@pytest.mark.parametrize(
    ("data_type", "stored", "device", "kept"),
    [
        ("fp32", "fp16", "cpu", torch.float16),
        ("fp32", "fp32", "cpu", None),
        ("fp16", "fp32", "cpu", torch.float16),
        ("fp32", "bf16", "cpu", BF16),  # fp16 does not hold all its values
        ("bf16", "fp16", "cpu", BF16),
        ("fp32", "fp16", "cuda", None),
    ],
)
def test_matrices_are_kept_in_half_where_the_cpu_widens_them(data_type, stored, device, kept):
    assert matrix_dtype(data_type, stored, torch.device(device)) == kept
