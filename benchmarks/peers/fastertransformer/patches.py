"""The changes that today's compilers and GPUs need in FasterTransformer's sources, with reasons."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Patch(NamedTuple):
    """A replacement, made wherever the pattern occurs in the files."""

    files: str  # a glob in the folder of the checkouts
    old: str  # a regular expression
    new: str
    reason: str


_CODE = "FasterTransformer/src/fastertransformer"

PATCHES = (
    Patch(
        f"{_CODE}/**/*.cu",
        r'#include "3rdparty/(cub/[\w/]+\.cuh)"',
        r"#include <\1>",
        "the bundled CUB clashes with CUDA 13's own",
    ),
    Patch(
        f"{_CODE}/**/*.cu",
        r"\bcub::Max\b",
        "::cuda::maximum<>",
        "CUB 3 has no operators of its own",
    ),
    Patch(
        f"{_CODE}/**/*.cu",
        r"\bcub::Sum\b",
        "::cuda::std::plus<>",
        "CUB 3 has no operators of its own",
    ),
    Patch(
        f"{_CODE}/utils/cuda_utils.h",
        r"#include <fstream>",
        "#include <array>\n#include <cstdint>\n#include <fstream>",
        "g++ 12's headers include fewer others",
    ),
    Patch(
        f"{_CODE}/kernels/cutlass_kernels/fpA_intB_gemm/fpA_intB_gemm_template.h",
        r"sm_ >= 80 && sm_ < 90",
        "sm_ >= 80 && sm_ <= 90",
        "weight-only int8 refuses Hopper, which runs the kernels for Ampere",
    ),
    Patch(
        f"{_CODE}/kernels/cutlass_kernels/cutlass_preprocessors.cc",
        r"arch >= 80 && arch < 90",
        "arch >= 80 && arch <= 90",
        "the same, where weights are loaded",
    ),
    Patch(
        f"{_CODE}/cutlass_extensions/include/cutlass_extensions/gemm/kernel/fpA_intB_gemm.h",
        r"\(__CUDA_ARCH__ >= 800\) && \(__CUDA_ARCH__ < 900\)",
        "(__CUDA_ARCH__ >= 800) && (__CUDA_ARCH__ <= 900)",
        "the same, in the kernel, which otherwise computes nothing",
    ),
    Patch(
        f"{_CODE}/utils/gemm_test/gemm_func.cc",
        r"^( +)matmulTileName\[tile\],",
        r"\1tile < int(sizeof matmulTileName / sizeof *matmulTileName) ? matmulTileName[tile]"
        r' : "new",',
        "new tiles lie behind the end of the tuning programs' table of names",
    ),
)


def apply_patches(tree: Path) -> None:
    """Change a copy of the checkouts.

    Raises:
        ValueError: a pattern occurs nowhere: the checkouts are of another version.
    """
    for patch in PATCHES:
        changed = 0
        for path in tree.glob(patch.files):
            text, count = re.subn(patch.old, patch.new, path.read_text("utf-8"), flags=re.M)
            if count:
                path.write_text(text, encoding="utf-8")
            changed += count
        if not changed:
            raise ValueError(f"{patch.files} has no {patch.old!r}: another version of the sources.")
