"""Memory settings of an engine process: huge pages, smaller kernel caches, less garbage collection.

Decoding reads all weights for each token; with 2 MB pages its matrix products are 10 to 20% faster.
oneDNN and torch each cache up to 1,024 kernels by default, one for each shape of a product on a
CPU, of 0.5 MB or more. torch, oneDNN and glibc read the variables when a process starts.
"""

import ctypes
import gc
import importlib
import os
from collections.abc import Sequence

_TUNABLE = "glibc.malloc.hugetlb"
_KEPT_KERNELS = "256"
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # of oneDNN, and of torch


def memory_variables() -> dict[str, str]:
    """Return the variables for a new process; variables that this process has set are kept."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if _TUNABLE not in tunables:  # 1: malloc, which allocates FBGEMM's weights, uses huge pages
        tunables = ":".join(filter(None, (tunables, f"{_TUNABLE}=1")))
    defaults = {"THP_MEM_ALLOC_ENABLE": "1", **dict.fromkeys(_CACHES, _KEPT_KERNELS)}
    variables = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return {**variables, "GLIBC_TUNABLES": tunables}


def import_modules(names: Sequence[str]) -> None:
    """Import modules without garbage collection, and exempt them from it as `keep_loaded` does.

    Collections take a tenth of the time of importing torch and find next to nothing.
    """
    gc.disable()
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def keep_loaded() -> None:
    """Exempt all current objects from garbage collection.

    Scanning them would block all answers for 0.2 s each time.
    """
    gc.collect()
    gc.freeze()


def give_back_memory() -> None:
    """Collect garbage, also among the objects that `keep_loaded` exempted, and return it to the OS.

    glibc would keep most of the memory of weights: 0.7 of 0.8 GB.
    """
    gc.unfreeze()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
