"""Environment variables with which a process keeps its weights in huge pages, where the system can.

Decoding reads all weights for each token. In pages of 2 MB its products are 10 to 20% faster. torch
and glibc read the variables when a process starts.
"""

from __future__ import annotations

import os

_TUNABLE = "glibc.malloc.hugetlb"


def huge_page_variables() -> dict[str, str]:
    """Return the variables for a new process; what this process has set stays."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if _TUNABLE not in tunables:  # 1: malloc, which FBGEMM's weights come from, asks for them
        tunables = ":".join(filter(None, (tunables, f"{_TUNABLE}=1")))
    torch_asks = os.environ.get("THP_MEM_ALLOC_ENABLE", "1")
    return {"THP_MEM_ALLOC_ENABLE": torch_asks, "GLIBC_TUNABLES": tunables}
