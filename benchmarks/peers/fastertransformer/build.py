"""Build of FasterTransformer and its Triton backend with today's CUDA compilers.

    python -m benchmarks.peers.fastertransformer.build SOURCES OUTPUT --arch 90

SOURCES holds checkouts: `FasterTransformer` (main), `cutlass` (the commit of its submodule),
`fastertransformer_backend` (main), `triton-core`, `triton-common` and `triton-backend` (the release
of the tritonserver that shall load the backend), and `rapidjson`. OUTPUT gets
`backends/fastertransformer/libtriton_fastertransformer.so` and the programs `bin/gpt_gemm`,
`bin/t5_gemm` and `bin/bert_gemm`. nvcc, g++ and ninja are found on PATH.

The checkouts stay as they are: a copy is changed by the steps of `patches.py`, and compiled. Left
out are vision, speech, FP8, NVTX ranges, mixtures of experts, and attention kernels of other GPUs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.peers.fastertransformer.patches import apply_patches

_CODE = "FasterTransformer/src/fastertransformer"
_FUSED = "FasterTransformer/3rdparty/trt_fused_multihead_attention"
_FOLDERS = (
    *(f"{_CODE}/kernels{sub}" for sub in ("", "/decoder_masked_multihead_attention")),
    *(f"{_CODE}/kernels/cutlass_kernels{sub}" for sub in ("", "/fpA_intB_gemm", "/int8_gemm")),
    f"{_CODE}/kernels/cutlass_kernels/moe_gemm",
    *(f"{_CODE}/layers{sub}" for sub in ("", "/adapter_layers", "/attention_layers")),
    *(f"{_CODE}/layers/{kind}_layers" for kind in ("beam_search", "sampling")),
    *(f"{_CODE}/models/{family}" for family in ("multi_gpu_gpt", "gptj", "gptneox", "t5", "bert")),
    *(f"{_CODE}/triton_backend{sub}" for sub in ("", "/multi_gpu_gpt", "/gptj", "/gptneox")),
    *(f"{_CODE}/triton_backend/{family}" for family in ("t5", "t5-encoder", "bert")),
    f"{_CODE}/utils",
    "FasterTransformer/3rdparty/common",
    "triton-backend/src",
    "triton-common/src",
    "fastertransformer_backend/src",
)
_LEFT_OUT = re.compile(
    r"fp8|FP8|INT8|_test\.cc|_gemm\.cc|/gemm\.cc"
    r"|model_config\.cc|logging\.cc|table_printer\.cc|device_memory_tracker"
    r"|image_|reverse_roll|vit_|xlnet|[Ll]ongformer|[Dd]isentangled|normalize_kernels|transform_mask"
    r"|WindowAttention|unfused_attention_int8|/quantize_weight|dequantize"
)
_PROGRAMS = {
    "gpt_gemm": ("models/multi_gpu_gpt/gpt_gemm", "gpt_gemm_func"),
    "t5_gemm": ("models/t5/t5_gemm", "t5_gemm_func"),
    "bert_gemm": ("models/bert/bert_gemm", "encoder_gemm_func", "encoder_igemm_func"),
}
_TOOLS = re.compile(
    r"utils/(memory_utils|cuda_utils|logger|Tensor|cublas\w+)\."
    r"|/cutlass_preprocessors|3rdparty/common/"
)
_DEFINES = (
    *("BUILD_MULTI_GPU", "USE_TRITONSERVER_DATATYPE", "WMMA", "CUDA_PTX_FP8_F2FP_ENABLED"),
    # Without NDEBUG every kernel would be waited for.
    *("TRITON_ENABLE_GPU=1", "TRITON_ENABLE_STATS=1", "NDEBUG"),
)
# Weight-only int8; other mixed products compile for long and are not reached.
_MIXED = ("fpA_intB_gemm_fp16_int8",)
_INCLUDES = (
    *("FasterTransformer", "cutlass/include", "rapidjson/include"),
    f"{_CODE}/cutlass_extensions/include",
    *(f"triton-{part}/include" for part in ("core", "backend", "common")),
)


def main() -> int:
    """Parse the command line and build; return ninja's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--include", type=Path, nargs="*", default=[], help="of CUDA, NCCL and MPI")
    parser.add_argument("--library", type=Path, nargs="*", default=[], help="of the same")
    parser.add_argument("--arch", default="90", help="compute capability")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    tree, output = options.output / "sources", options.output.resolve()
    if not tree.is_dir():
        partial = output / "unpatched"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(options.sources, partial)
        apply_patches(partial)
        partial.rename(tree)
    (output / "build.ninja").write_text(
        ninja_file(tree.resolve(), options.arch, options.include, options.library)
    )
    # -k 0: every error of the compilers is worth seeing.
    return subprocess.call(["ninja", "-C", output, "-k", "0", "-j", str(options.jobs)])


def ninja_file(tree: Path, arch: str, includes: Sequence[Path], libraries: Sequence[Path]) -> str:
    """Return the rules of the build of `tree`."""
    sources = [
        path
        for folder in _FOLDERS
        for path in sorted((tree / folder).iterdir())
        if path.suffix in (".cc", ".cpp", ".cu")
        and not _LEFT_OUT.search(str(path.relative_to(tree)))
    ]
    sources += [tree / _FUSED / "qkvToContext.cu", *_cubins(tree, arch)]
    dry_run = ["nvcc", "--dryrun", "-c", "any.cu"]
    said = subprocess.run(dry_run, check=True, text=True, capture_output=True).stderr
    (toolkit,) = re.findall(r"TOP=(\S+)", said)
    words = [f"-D{name}" for name in _DEFINES]
    words += [f"-I{tree / folder}" for folder in _INCLUDES]
    words += [f"-I{folder.resolve()}" for folder in includes]
    linked = [f"-L{folder.resolve()}" for folder in libraries]
    linked += ["-l:libcublas.so.13", "-l:libcublasLt.so.13", "-l:libcurand.so.10"]
    linked += ["-l:libnccl.so.2", "-l:libmpi.so.40"]
    lines = [
        # FasterTransformer's own flags: fast mathematics is its default.
        "rule cuda",
        f"  command = nvcc -std=c++17 -arch=sm_{arch} -O3 --use_fast_math --expt-relaxed-constexpr"
        " --expt-extended-lambda -Xcompiler -fPIC -w -MD -MF $out.d"
        f" {' '.join(words)} $more -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule host",
        # nvcc would show CUTLASS a device compiler here, too.
        f"  command = g++ -std=c++17 -O3 -fPIC -w -include stdio.h -MD -MF $out.d"
        f" {' '.join(words)} -I{toolkit}/include -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = nvcc -arch=sm_{arch} $flags $in -o $out {' '.join(linked)}",
    ]

    def compiled(paths: Iterable[Path]) -> str:
        objects = []
        for path in paths:
            objects.append(f"objects/{path.relative_to(tree)}.o")
            lines.append(
                f"build {objects[-1]}: {'cuda' if path.suffix == '.cu' else 'host'} {path}"
            )
            if path.stem in _MIXED:
                lines.append("  more = -DBUILD_CUTLASS_MIXED_GEMM")
        return " ".join(objects)

    backend = "backends/fastertransformer/libtriton_fastertransformer.so"
    exported = tree / "fastertransformer_backend/src/libtriton_fastertransformer.ldscript"
    objects = compiled(sources)
    lines += [
        f"build {backend}: link {objects}",
        f"  flags = -shared -Xlinker --version-script={exported}",
    ]
    tools = compiled([tree / _CODE / "utils/gemm_test/gemm_func.cc"]).split()
    tools += [word for word in objects.split() if _TOOLS.search(word)]
    for name, (program, *functions) in _PROGRAMS.items():
        own = (program, *(f"utils/gemm_test/{each}" for each in functions))
        parts = compiled(tree / _CODE / f"{each}.cc" for each in own)
        lines.append(f"build bin/{name}: link {parts} {' '.join(tools)}")
    return "\n".join(lines) + "\n"


def _cubins(tree: Path, arch: str) -> list[Path]:
    """Return the fused kernels of a GPU, and a file of empty ones where the headers name others."""
    folder = tree / _FUSED
    kept = list(folder.glob(f"*sm{arch}*.cpp"))
    text = "".join(path.read_text() for path in kept)
    names = re.findall(
        r"extern (unsigned \w+|uint32_t) (\w+)((?:\[\])?);",
        "".join(path.read_text() for path in sorted(folder.rglob("*.h"))),
    )
    empty = folder / "left_out.cc"
    empty.write_text(
        "#include <cstdint>\nnamespace fastertransformer {\n"
        + "".join(
            f"extern {kind} {name}{dims}; {kind} {name}{dims and '[1]'} = {{0}};\n"
            for kind, name, dims in dict.fromkeys(names)
            if not re.search(rf"\b{name}\b", text)
        )
        + "}\n"
    )
    return [*kept, empty]


if __name__ == "__main__":
    sys.exit(main())
