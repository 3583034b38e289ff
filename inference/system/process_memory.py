"""Memory of a process that computes: huge pages for weights, few kept kernels, less garbage.

Decoding reads all weights for each token. In pages of 2 MB its products are 10 to 20% faster. For
each shape of a product on CPU, oneDNN and torch keep a kernel of 0.5 MB or more, 1,024 each by
default. torch, oneDNN and glibc read the variables when a process starts.
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
    """Return the variables for a new process; what this process has set stays."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if _TUNABLE not in tunables:  # 1: malloc, which FBGEMM's weights come from, asks for them
        tunables = ":".join(filter(None, (tunables, f"{_TUNABLE}=1")))
    defaults = {"THP_MEM_ALLOC_ENABLE": "1", **dict.fromkeys(_CACHES, _KEPT_KERNELS)}
    kept = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return {**kept, "GLIBC_TUNABLES": tunables}


def import_modules(names: Sequence[str]) -> None:
    """Import modules, and exempt them from collections of garbage as `keep_loaded` does.

    While torch is imported, collections take a tenth of the time and find next to nothing.
    """
    gc.disable()
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def keep_loaded() -> None:
    """Exempt all that is loaded from later collections of garbage.

    Searching it would stop all answers for 0.2 s each time.
    """
    gc.collect()
    gc.freeze()


def give_back_memory() -> None:
    """Collect garbage, also among what `keep_loaded` exempted, and return it to the system.

    glibc would keep most of what weights have taken: 0.7 of 0.8 GB.
    """
    gc.unfreeze()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
