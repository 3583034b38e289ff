#!/bin/bash
# Builds FasterTransformer and its Triton backend with today's CUDA compilers:
#     INCLUDE="FOLDER ..." LIBRARY="FOLDER ..." benchmarks/peers/fastertransformer/build.sh SOURCES OUTPUT [90]
# SOURCES holds the checkouts that docs/fastertransformer_backend.md names. OUTPUT gets
# backends/fastertransformer/libtriton_fastertransformer.so and bin/{gpt,t5,bert}_gemm. INCLUDE and LIBRARY
# are the folders of CUDA, NCCL and MPI; nvcc and g++ are on PATH; 90 is the compute capability.
# It leaves out vision, speech, FP8, NVTX ranges, mixtures of experts, and attention kernels of other GPUs.
set -euo pipefail
sources=$(realpath "$1") && mkdir -p "$2" && output=$(realpath "$2") && export arch=${3:-90}
tree=$output/sources code=FasterTransformer/src/fastertransformer

patch() { # EXPRESSION FILES: apply a sed expression, which must match in one of the files
    grep -qE "$(cut -d'~' -f2 <<< "$1")" "${@:2}" || { echo "no $1 in $2: another version"; exit 1; }
    sed -Ei "$1" "${@:2}"
}
if [ ! -d "$tree" ]; then
    rm -rf "$output/unpatched" && cp -r "$sources" "$output/unpatched" && cd "$output/unpatched/$code"
    mapfile -t kernels < <(find . -name '*.cu')
    # The bundled CUB clashes with that of CUDA 13, and CUB 3 has removed its operators.
    patch 's~#include "3rdparty/(cub/[[:alnum:]_/]+\.cuh)"~#include <\1>~' "${kernels[@]}"
    patch 's~\bcub::Max\b~::cuda::maximum<>~g' "${kernels[@]}"
    patch 's~\bcub::Sum\b~::cuda::std::plus<>~g' "${kernels[@]}"
    # The headers of g++ 12 include fewer other headers.
    patch 's~#include <fstream>~#include <array>\n#include <cstdint>\n&~' utils/cuda_utils.h
    # Weight-only int8 refuses Hopper, which can run the kernels for Ampere: in the choice of kernels, when
    # weights are loaded, and in the kernel, which would compute nothing.
    patch 's~sm_ >= 80 && sm_ < 90~sm_ >= 80 \&\& sm_ <= 90~' \
        kernels/cutlass_kernels/fpA_intB_gemm/fpA_intB_gemm_template.h
    patch 's~arch >= 80 && arch < 90~arch >= 80 \&\& arch <= 90~' kernels/cutlass_kernels/cutlass_preprocessors.cc
    patch 's~\(__CUDA_ARCH__ < 900\)~(__CUDA_ARCH__ <= 900)~' \
        cutlass_extensions/include/cutlass_extensions/gemm/kernel/fpA_intB_gemm.h
    # New tiles are beyond the end of the tuning programs' table of names.
    patch 's~^( +)matmulTileName\[tile\],~\1tile < int(sizeof matmulTileName / sizeof *matmulTileName) ? matmulTileName[tile] : "new",~' \
        utils/gemm_test/gemm_func.cc
    # Attention kernels that headers declare and no file for this GPU defines become empty.
    cd ../../3rdparty/trt_fused_multihead_attention
    { echo '#include <cstdint>'; echo 'namespace fastertransformer {'
      grep -rhoE 'extern (unsigned \w+|uint32_t) \w+(\[\])?;' --include='*.h' . | sort -u | tr -d ';' |
        while read -r extern type name; do
            grep -sqwF "${name%\[\]}" -- *sm"$arch"*.cpp || echo "$extern $type $name; $type ${name/\[\]/[1]} = {0};"
        done; echo '}'; } > left_out.cc
    mv "$output/unpatched" "$tree"
fi

cd "$tree"
# Without NDEBUG, the host synchronises after every kernel.
export flags="-std=c++17 -O3 -w -DBUILD_MULTI_GPU -DUSE_TRITONSERVER_DATATYPE -DWMMA -DCUDA_PTX_FP8_F2FP_ENABLED
    -DTRITON_ENABLE_GPU=1 -DTRITON_ENABLE_STATS=1 -DNDEBUG -IFasterTransformer -Icutlass/include -Irapidjson/include
    -I$code/cutlass_extensions/include -Itriton-core/include -Itriton-backend/include -Itriton-common/include
    ${INCLUDE:+$(printf -- ' -I%s' $INCLUDE)}"
libraries="${LIBRARY:+$(printf -- ' -L%s' $LIBRARY)} -l:libcublas.so.13 -l:libcublasLt.so.13 -l:libcurand.so.10
    -l:libnccl.so.2 -l:libmpi.so.40"
toolkit=$(nvcc --dryrun -c any.cu 2>&1 | sed -n 's/.*TOP=\([^ ]*\).*/\1/p')
export objects=$output/objects toolkit
compile() {
    object=$objects/$1.o && mkdir -p "${object%/*}" && if [ -f "$object" ]; then return; fi
    case $1 in # fast math is FasterTransformer's default; weight-only int8 is the only mixed GEMM in use
        *fpA_intB_gemm_fp16_int8.cu) more=-DBUILD_CUTLASS_MIXED_GEMM ;;&
        *.cu) nvcc $flags ${more:-} -arch=sm_$arch --use_fast_math --expt-relaxed-constexpr --expt-extended-lambda \
            -Xcompiler -fPIC -c "$1" -o "$object.part" ;;
        *) g++ $flags -fPIC -include stdio.h -I"$toolkit/include" -c "$1" -o "$object.part" ;;
    esac && mv "$object.part" "$object"
}
export -f compile
# shellcheck disable=SC2086
folders=$(eval echo $code/kernels{,/decoder_masked_multihead_attention} \
    $code/kernels/cutlass_kernels{,/fpA_intB_gemm,/int8_gemm,/moe_gemm} \
    $code/layers{,/{adapter,attention,beam_search,sampling}_layers} $code/models/{multi_gpu_gpt,gptj,gptneox,t5,bert} \
    $code/triton_backend{,/{multi_gpu_gpt,gptj,gptneox,t5,t5-encoder,bert}} $code/utils)
own=$(find $folders FasterTransformer/3rdparty/common {triton-backend,triton-common,fastertransformer_backend}/src \
    -maxdepth 1 -regex '.*\.\(cc\|cpp\|cu\)' | grep -vE 'fp8|FP8|INT8|_test\.cc|_gemm\.cc|/gemm\.cc|model_config\.cc|logging\.cc'\
'|table_printer\.cc|device_memory_tracker|image_|reverse_roll|vit_|xlnet|[Ll]ongformer|[Dd]isentangled'\
'|normalize_kernels|transform_mask|WindowAttention|unfused_attention_int8|/quantize_weight|dequantize')
fused=FasterTransformer/3rdparty/trt_fused_multihead_attention
own+=" $fused/qkvToContext.cu $fused/left_out.cc $(find $fused -maxdepth 1 -name "*sm$arch*.cpp")"
tools=$(grep -E 'utils/(memory_utils|cuda_utils|logger|Tensor|cublas\w+)\.|/cutlass_preprocessors|3rdparty/common/' \
    <<< "${own// /$'\n'}")
tools+=" $code/utils/gemm_test/gemm_func.cc"
declare -A programs=(
    [gpt_gemm]="models/multi_gpu_gpt/gpt_gemm utils/gemm_test/gpt_gemm_func"
    [t5_gemm]="models/t5/t5_gemm utils/gemm_test/t5_gemm_func"
    [bert_gemm]="models/bert/bert_gemm utils/gemm_test/encoder_gemm_func utils/gemm_test/encoder_igemm_func"
)
mains=$(printf "$code/%s.cc " ${programs[*]})
printf '%s\n' $own $tools $mains | sort -u | xargs -P "$(nproc)" -I{} bash -c 'compile {}'

link() { nvcc -arch=sm_"$arch" -o "$@" $libraries; }
mkdir -p "$output/bin" "$output/backends/fastertransformer"
link "$output/backends/fastertransformer/libtriton_fastertransformer.so" -shared \
    -Xlinker --version-script=fastertransformer_backend/src/libtriton_fastertransformer.ldscript \
    $(printf "$objects/%s.o " $own)
for name in "${!programs[@]}"; do
    link "$output/bin/$name" $(printf "$objects/%s.o " $tools) $(printf "$objects/$code/%s.cc.o " ${programs[$name]})
done
