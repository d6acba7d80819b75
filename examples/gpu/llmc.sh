#!/usr/bin/env bash
# Builds train_gpt2cu of llm.c (https://github.com/karpathy/llm.c, MIT license), which check.sh times beside Frit. Needs
# neither a GPU nor the CUDA toolkit: compiler, headers and libraries come from NVIDIA's Python wheels, of the versions that
# PyTorch 2.11 for CUDA 13.0 installs. Uses llm.c's own Makefile, with cuDNN's attention, at the revision below.
#
#   examples/gpu/llmc.sh [--arch sm_90] [--source CHECKOUT] [--build DIR] OUT
#
# Writes the folder OUT: the program, its license, and the revision. --source is a checkout or a bare clone, else GitHub is
# asked for one; --build (target/llm.c) holds the wheels, for the next time. Without network, pip or a C++ compiler it
# ends with exit code 1 and says what is missing.
set -euo pipefail

revision=f1e2ace651495b74ae22d45d1723443fd00ecd3a
packages=("cuda-toolkit[cccl,crt,cublas,cudart,nvcc,nvtx,nvvm,profiler]==13.0.2" nvidia-cudnn-cu13==9.19.0.56)
frontend=nvidia-cudnn-frontend==1.14.0
python=${PYTHON:-python3}
arch=sm_90 source=https://github.com/karpathy/llm.c build=target/llm.c out=
fail() { echo "llmc: $*" >&2; exit 1; }
while [[ $# -gt 0 ]]; do
    case $1 in
    --arch) arch=$2; shift ;;
    --source) source=$2; shift ;;
    --build) build=$2; shift ;;
    -*) fail "unknown option $1" ;;
    *) out=$1 ;;
    esac
    shift
done
[[ -n $out ]] || fail "name the folder to write"
for program in git make c++ "$python"; do
    command -v "$program" > /dev/null || fail "$program is not installed"
done
mkdir -p "$build" "$out"
build=$(cd "$build" && pwd) out=$(cd "$out" && pwd)

if [[ ! -e $build/wheels.done ]]; then
    rm -rf "$build/wheels"
    # Only the headers of the latter are used, none of what it depends on.
    "$python" -m pip install --quiet --target "$build/wheels" "${packages[@]}" 2> "$build/pip.log" &&
        "$python" -m pip install --quiet --no-deps --target "$build/wheels" "$frontend" 2>> "$build/pip.log" ||
        fail "NVIDIA's compiler cannot be installed with $python -m pip: $(tail -1 "$build/pip.log")"
    touch "$build/wheels.done"
fi
rm -rf "$build/source"
git clone --quiet "$source" "$build/source" 2> "$build/git.log" ||
    fail "llm.c cannot be cloned from $source: $(tail -1 "$build/git.log"); name a checkout with --source"
git -C "$build/source" checkout --quiet "$revision" 2> "$build/git.log" ||
    fail "the clone of $source has no revision $revision"

toolkit=$build/wheels/nvidia/cu13 cudnn=$build/wheels/nvidia/cudnn links=$build/links
# Wheels have no files by the names that the linker looks for, and no library of the driver, which is only named.
mkdir -p "$links"
chmod +x "$toolkit"/bin/* "$toolkit"/nvvm/bin/*
for library in "$toolkit"/lib/lib{cublas,cublasLt}.so.13 "$cudnn/lib/libcudnn.so.9"; do
    name=$(basename "$library")
    ln -sf "$library" "$links/${name%.so.*}.so"
done
mkdir -p "$build/source/cudnn-frontend"
ln -s "$build/wheels/include" "$build/source/cudnn-frontend/include"
echo | c++ -x c++ -shared -Wl,-soname,libnvidia-ml.so.1 -o "$links/libnvidia-ml.so" - || fail "c++ links no library"
# CUDA 13 names places of memory by a structure where llm.c passes a number, which it does only to go on in host memory
# when the GPU's is full: instead, such a run ends as out of memory. Nothing else differs from llm.c's own build.
cat > "$build/cuda13.h" << 'END'
#include <cuda_runtime.h>
static inline cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, int) { return cudaSuccess; }
#define cudaMallocManaged(...) cudaErrorMemoryAllocation
END
(
    export PATH=$toolkit/bin:$toolkit/nvvm/bin:$PATH
    export CPATH=$toolkit/include:$toolkit/include/cccl:$cudnn/include LIBRARY_PATH=$links:$toolkit/lib
    export NVCC_APPEND_FLAGS="-include $build/cuda13.h -Xcompiler -static-libstdc++ -Xcompiler -static-libgcc"
    make -C "$build/source" train_gpt2cu NVCC="$toolkit/bin/nvcc" CI=true GPU_COMPUTE_CAPABILITY="${arch#sm_}" PRECISION=BF16 USE_CUDNN=1 \
        NO_MULTI_GPU=1 NO_USE_MPI=1
) > "$build/make.log" 2>&1 || fail "llm.c does not build: $(grep -m 1 -iE 'error|\*\*\*' "$build/make.log" || tail -1 "$build/make.log") ($build/make.log)"
strip -o "$out/train_gpt2cu" "$build/source/train_gpt2cu"
cp "$build/source/LICENSE" "$out/LICENSE"
echo "$revision" > "$out/revision"
echo "llmc: $out/train_gpt2cu, $(($(stat -c %s "$out/train_gpt2cu") >> 10)) KiB, for $arch, llm.c at ${revision:0:7}"
