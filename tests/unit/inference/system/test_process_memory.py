"""A process that computes keeps few kernels, and what its user has set stays."""

import os
import subprocess
import sys

import pytest
import torch

from inference.parallel.gemm_cpu import has_onednn
from inference.system.process_memory import memory_variables

_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
# Prints how many MiB products of 300 shapes leave in memory.
_PRODUCTS = """
import torch
from inference.parallel.epilogue import Epilogue
from inference.parallel.gemm_cpu import OneDnnGemm

def resident():
    return int(open("/proc/self/statm").read().split()[1]) >> 8

torch.set_num_threads(1)
product = OneDnnGemm(torch.randn(128, 512), Epilogue(torch.zeros(512), "gelu_erf"))
product(torch.randn(4, 128))
before = resident()
for rows in range(5, 305):
    product(torch.randn(rows, 128))
print(resident() - before)
"""


def test_what_is_set_stays(monkeypatch):
    for name in (*_CACHES, "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    assert memory_variables() == {
        **dict.fromkeys(_CACHES, "256"),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    assert memory_variables()["LRU_CACHE_CAPACITY"] == "7"
    assert memory_variables()["GLIBC_TUNABLES"].startswith("glibc.malloc.arena_max=1:glibc")


@pytest.mark.skipif(not has_onednn(torch.float32), reason="needs oneDNN")
def test_the_variables_bound_what_shapes_leave_in_memory():
    def left(kept: str) -> int:
        environment = os.environ | memory_variables() | dict.fromkeys(_CACHES, kept)
        command = [sys.executable, "-c", _PRODUCTS]
        return int(subprocess.check_output(command, env=environment, text=True, timeout=120))

    assert left("1") < left("1024") / 4
