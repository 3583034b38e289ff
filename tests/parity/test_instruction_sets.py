"""Parity, sampling, beams and ties hold with the instruction sets of other processors.

torch and oneDNN read the variables when they start: each set has a process of its own. Where the
processor lacks a set, the best that it has runs instead: oneDNN sees to that itself, torch would
die of an illegal instruction. The rest of the tests run with all that the processor has.
"""

import os
import subprocess
import sys

import pytest
import torch

from inference.parallel.native_cpu import has_library
from tests.conftest import ROOT

# Vectors of torch's own kernels, and the most that oneDNN may use: products of int8 without VNNI,
# which saturate, and those with it but without AMX. Last, what the project's own library may use.
SETS = [
    ("default", "AVX2", "none"),
    pytest.param("avx2", "AVX512_CORE_VNNI", "avx2", marks=pytest.mark.long),
]
TESTS = (
    "tests/unit/inference/parallel/test_gemm.py",
    "tests/unit/inference/model/test_cached_attention.py",
    "tests/unit/inference/decoding/test_ties.py",
    "tests/unit/inference/decoding/test_beam_search.py",
    "tests/parity/test_ft_logits.py::test_one_rank_gives_recorded_logits_and_tokens[gpt2/tiny]",
    "tests/parity/test_ft_logits.py::test_one_rank_gives_recorded_logits_and_tokens[bloom/tiny]",
)


@pytest.mark.parametrize(("vectors", "products", "library"), SETS)
def test_results_hold_with(vectors, products, library):
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        vectors = "default"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS],
        cwd=ROOT,
        env=os.environ
        | {
            "ATEN_CPU_CAPABILITY": vectors,
            "ONEDNN_MAX_CPU_ISA": products,
            "SLIPWAY_CPU_KERNEL": library if has_library() else "none",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
