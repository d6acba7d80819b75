#!/usr/bin/env bash
# Installs what building Frit needs beyond Rust: LLVM/MLIR 22 with static libraries, libclang, and the libraries LLVM
# links. Looks first, so that a second run does nothing and needs no network.
#
#   .ci/setup.sh            the build dependencies
#   .ci/setup.sh --check    only look: exit 1 if something is missing, install nothing
#   .ci/setup.sh --ptxas    also NVIDIA's assembler and NVRTC, for the tests that compile for GPUs; prints
#                           `export FRIT_PTXAS=PATH` and `export FRIT_NVRTC=PATH` on standard output, or a
#                           notice and nothing for what cannot be had
#   .ci/setup.sh --cudnn    also cuDNN, for the test that asks it for engines; prints `export FRIT_CUDNN=DIRS`, or a
#                           notice and nothing
#   .ci/setup.sh --onnx-tests   also ONNX's backend tests, for the conformance tests; prints
#                           `export FRIT_ONNX_TESTS=DIR`, or a notice and nothing
#   .ci/setup.sh --onnxruntime  also onnx, onnxruntime and tokenizers for Python, for the tests of exported models; prints
#                           `export FRIT_ONNXRUNTIME=DIR`, or a notice and nothing
#   .ci/setup.sh --python       also NumPy and pytest for Python, for the tests of the package frit; prints
#                           `export FRIT_PYTHON=DIR`, or a notice and nothing
#   .ci/setup.sh --mpi          also Open MPI, for the tests of the feature `mpi`; prints
#                           `export FRIT_MPI=1`, or a notice and nothing
#   .ci/setup.sh --z3           also the solver Z3, for the proofs of the rewrite rules; prints
#                           `export FRIT_Z3=PATH`, or a notice and nothing
#   .ci/setup.sh --chromium     also the browser Chromium, for the tests of the report's page; prints
#                           `export FRIT_CHROMIUM=PATH`, or a notice and nothing
#   .ci/setup.sh --emulators    also qemu-user, and a cross compiler and Rust's library for aarch64, for the tests of kernels of
#                           other processors; prints `export FRIT_EMULATORS=1`, or a notice and nothing
set -euo pipefail
cd "$(dirname "$0")/.."

LLVM_MAJOR=22
ONNX_VERSION=1.22.0
ONNXRUNTIME_PACKAGES=(onnxruntime onnx numpy tokenizers)
PYTHON_PACKAGES=(pytest numpy)
CUDNN_PACKAGE=nvidia-cudnn-cu13 CUDNN_VERSION=9.26.0.51
APT_PACKAGES=(
    "llvm-$LLVM_MAJOR-dev" "libmlir-$LLVM_MAJOR-dev" "mlir-$LLVM_MAJOR-tools" "libclang-$LLVM_MAJOR-dev"
    "libpolly-$LLVM_MAJOR-dev" libzstd-dev libz3-dev libxml2-dev zlib1g-dev build-essential
)

MPI_PACKAGES=(libopenmpi-dev openmpi-bin)
CHROMIUM_PACKAGES=(chromium fonts-dejavu-core)
EMULATOR_PACKAGES=(qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
AARCH64=aarch64-unknown-linux-gnu

note() { echo "setup: $*" >&2; }

# The value a variable has in the build: the environment's, else the one of .cargo/config.toml.
build_variable() {
    local name=$1
    if [[ -n ${!name:-} ]]; then
        echo "${!name}"
    else
        sed -n "s/^$name *= *\"\(.*\)\"/\1/p" .cargo/config.toml
    fi
}

# Prints one line for each thing that is missing.
missing() {
    local name prefix version clang lib
    command -v cc >/dev/null || echo "a C compiler and linker, as \`cc\`"
    command -v c++ >/dev/null || echo "a C++ compiler, as \`c++\`"
    command -v cargo >/dev/null || echo "Rust, from https://rustup.rs"
    for name in MLIR_SYS_220_PREFIX TABLEGEN_220_PREFIX LLVM_SYS_220_PREFIX; do
        prefix=$(build_variable "$name")
        version=$("$prefix/bin/llvm-config" --version 2>/dev/null || true)
        [[ $version == "$LLVM_MAJOR".* ]] || echo "LLVM $LLVM_MAJOR at $prefix ($name)"
    done
    prefix=$(build_variable MLIR_SYS_220_PREFIX)
    [[ -e $prefix/lib/libMLIRIR.a ]] || echo "MLIR's static libraries in $prefix/lib (MLIR_SYS_220_PREFIX)"
    [[ -e $prefix/include/mlir-c/IR.h ]] || echo "MLIR's C headers in $prefix/include (MLIR_SYS_220_PREFIX)"
    [[ -x $prefix/bin/mlir-tblgen ]] || echo "mlir-tblgen in $prefix/bin (MLIR_SYS_220_PREFIX)"
    prefix=$(build_variable LLVM_SYS_220_PREFIX)
    [[ -e $prefix/lib/libLLVMCore.a ]] || echo "LLVM's static libraries in $prefix/lib (LLVM_SYS_220_PREFIX)"
    [[ -e $prefix/lib/libPolly.a ]] || echo "Polly's static library in $prefix/lib (LLVM_SYS_220_PREFIX)"
    clang=$(build_variable LIBCLANG_PATH)
    compgen -G "$clang/libclang*.so*" >/dev/null || compgen -G "$clang/libclang*.dylib" >/dev/null ||
        echo "libclang in $clang (LIBCLANG_PATH)"
    if command -v cc >/dev/null; then
        for lib in zstd z3 xml2 z; do
            echo 'int main(void) { return 0; }' | cc -x c - -o /dev/null "-l$lib" 2>/dev/null ||
                echo "the library $lib with its development files"
        done
    fi
}

explain() {
    cat >&2 <<TEXT
setup: this system is not Debian or Ubuntu, so nothing was installed. Building Frit needs
  - Rust, from https://rustup.rs (the version is in rust-toolchain.toml)
  - a C and a C++ compiler
  - LLVM and MLIR $LLVM_MAJOR with static libraries, headers, llvm-config and mlir-tblgen, and Polly
  - libclang $LLVM_MAJOR
  - zstd, z3, libxml2 and zlib with their development files
and these variables where LLVM is not in /usr/lib/llvm-$LLVM_MAJOR (see .cargo/config.toml):
  MLIR_SYS_220_PREFIX, TABLEGEN_220_PREFIX, LLVM_SYS_220_PREFIX   the directory with bin/llvm-config
  LIBCLANG_PATH                                                   the directory with libclang.so
TEXT
}

# Installs packages.
apt_install() {
    local sudo=()
    if [[ $(id -u) -ne 0 ]]; then
        command -v sudo >/dev/null || { note "run as root, or install: $*"; return 1; }
        sudo=(sudo)
    fi
    note "installing $*"
    "${sudo[@]}" apt-get update -qq || note "apt-get update failed; trying with the package lists at hand"
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}

install_llvm() {
    if ! apt_install "${APT_PACKAGES[@]}"; then
        note "apt-get could not install these packages. Debian 12 and later carry LLVM $LLVM_MAJOR; for other releases"
        note "add the repository described on https://apt.llvm.org and run this again."
        return 1
    fi
}

# The path of a file of a wheel in target/cuda-wheels, installed if need be: PACKAGE, PATTERN of the path, and
# the version if it is to be one.
wheel_file() {
    local package=$1 pattern=$2 version=${3:+==$3} dir=target/cuda-wheels/$1 found
    if [[ ! -d $dir ]]; then
        command -v python3 >/dev/null || { note "no python3: the tests that need $package will be skipped"; return 1; }
        rm -rf "$dir.part"
        python3 -m pip install --quiet --disable-pip-version-check --retries 5 --timeout 60 --no-deps --target "$dir.part" "$package$version" >&2 || {
            note "$package cannot be installed: the tests that need it will be skipped"
            rm -rf "$dir.part"
            return 1
        }
        mv "$dir.part" "$dir"
    fi
    found=$(find "$PWD/$dir" -path "$pattern" -type f | sort | head -n 1)
    [[ -n $found ]] || { note "$package has no $pattern: the tests that need it will be skipped"; return 1; }
    echo "$found"
}

# The path of ptxas: FRIT_PTXAS, the PATH, or the wheel nvidia-cuda-nvcc.
ptxas_path() {
    local found
    [[ -x ${FRIT_PTXAS:-} ]] && { echo "$FRIT_PTXAS"; return; }
    command -v ptxas && return
    found=$(wheel_file nvidia-cuda-nvcc '*/bin/ptxas') || return 1
    chmod +x "$found"
    echo "$found"
}

# The path of libnvrtc: FRIT_NVRTC, or the wheel nvidia-cuda-nvrtc.
nvrtc_path() {
    [[ -e ${FRIT_NVRTC:-} ]] && { echo "$FRIT_NVRTC"; return; }
    wheel_file nvidia-cuda-nvrtc '*/lib/libnvrtc.so.[0-9]*'
}

# The folder of a library of a wheel, of Python's packages if it is there: PACKAGE, FILE, and the version if it is to
# be one.
library_folder() {
    local package=$1 file=$2 version=${3:-} found
    found=$(python3 - "$package" "$file" "$version" 2>/dev/null <<'PYTHON' || true
import sys
from importlib.metadata import distribution
name, file, version = sys.argv[1:]
package = distribution(name)
found = [package.locate_file(f) for f in package.files if f.name == file]
print(found[0].parent if found and version in ("", package.version) else "")
PYTHON
    )
    [[ -n $found && -e $found/$file ]] && { echo "$found"; return; }
    found=$(wheel_file "$package" "*/lib/$file" "$version") || return 1
    dirname "$found"
}

# The folders of cuDNN's libraries and of cuBLAS, which they load: FRIT_CUDNN, or those of the wheels.
cudnn_path() {
    local cudnn cublas
    [[ -n ${FRIT_CUDNN:-} ]] && { echo "$FRIT_CUDNN"; return; }
    cudnn=$(library_folder "$CUDNN_PACKAGE" libcudnn.so.9 "$CUDNN_VERSION") || return 1
    cublas=$(library_folder nvidia-cublas libcublasLt.so.13) || return 1
    echo "$cudnn:$cublas"
}

# The folder of ONNX's backend tests: FRIT_ONNX_TESTS, or the wheel onnx in target/onnx-tests, installed if need be.
# Later wheels no longer have the files. Only the tests are kept: nothing runs from it.
onnx_tests_path() {
    local home=target/onnx-tests data=site/onnx/backend/test/data
    [[ -d ${FRIT_ONNX_TESTS:-} ]] && { echo "$FRIT_ONNX_TESTS"; return; }
    if [[ ! -d $home/$data ]]; then
        command -v python3 >/dev/null || { note "no python3: ONNX's tests will be skipped"; return 1; }
        rm -rf "$home" "$home.part"
        python3 -m pip install --quiet --disable-pip-version-check --retries 5 --timeout 60 --no-deps --target "$home.part/site" \
            "onnx==$ONNX_VERSION" >&2 || {
            note "onnx $ONNX_VERSION cannot be installed: its tests will be skipped"
            rm -rf "$home.part"
            return 1
        }
        mv "$home.part" "$home"
    fi
    [[ -d $home/$data ]] || { note "the wheel onnx has no tests: they will be skipped"; return 1; }
    echo "$PWD/$home/$data"
}

# Whether a folder has Python packages: DIR PACKAGE...
has_packages() {
    local dir=$1 package
    shift
    for package in "$@"; do
        [[ -d $dir/$package ]] || return 1
    done
}

# The folder of Python packages: DIR or target/NAME, installed if need be: NAME DIR PACKAGE...
packages_path() {
    local name=$1 given=$2 home=target/$1
    shift 2
    [[ -n $given ]] && has_packages "$given" "$@" && { echo "$given"; return; }
    if ! has_packages "$home" "$@"; then
        command -v python3 >/dev/null || { note "no python3: the tests that need $* will be skipped"; return 1; }
        rm -rf "$home.part"
        python3 -m pip install --quiet --disable-pip-version-check --retries 5 --timeout 60 --only-binary :all: --target "$home.part" \
            "$@" >&2 || {
            note "$* cannot be installed: the tests that need them will be skipped"
            rm -rf "$home.part"
            return 1
        }
        rm -rf "$home"
        mv "$home.part" "$home"
    fi
    echo "$PWD/$home"
}

# Whether Open MPI is there with its development files; installed if need be.
has_mpi() {
    command -v mpicc >/dev/null && command -v mpirun >/dev/null && return
    command -v apt-get >/dev/null && apt_install "${MPI_PACKAGES[@]}" && return
    note "Open MPI cannot be installed: its tests will be skipped"
    return 1
}

# The path of Z3: FRIT_Z3, or that of the PATH; installed if need be.
z3_path() {
    [[ -x ${FRIT_Z3:-} ]] && { echo "$FRIT_Z3"; return; }
    command -v z3 && return
    command -v apt-get >/dev/null && apt_install z3 && command -v z3 && return
    note "Z3 cannot be installed: the proofs of the rewrite rules will be skipped"
    return 1
}

# The path of Chromium: FRIT_CHROMIUM, or that of the PATH; installed if need be.
chromium_path() {
    [[ -x ${FRIT_CHROMIUM:-} ]] && { echo "$FRIT_CHROMIUM"; return; }
    command -v chromium && return
    command -v apt-get >/dev/null && apt_install "${CHROMIUM_PACKAGES[@]}" && command -v chromium && return
    note "Chromium cannot be installed: the tests of pages in it will be skipped"
    return 1
}

# Whether programs for aarch64 can be built and run; what is lacking is installed if need be.
has_emulators() {
    local program found=true
    for program in qemu-aarch64 qemu-x86_64 aarch64-linux-gnu-gcc; do
        command -v "$program" >/dev/null || found=false
    done
    $found || { command -v apt-get >/dev/null && apt_install "${EMULATOR_PACKAGES[@]}"; } || {
        note "qemu-user cannot be installed: the tests of kernels of other processors will be skipped"
        return 1
    }
    [[ -d $(rustc --print sysroot)/lib/rustlib/$AARCH64/lib ]] && return
    command -v rustup >/dev/null && rustup target add "$AARCH64" >&2 && return
    note "Rust's library for $AARCH64 cannot be installed: the tests of kernels of other processors will be skipped"
    return 1
}

want_ptxas=false want_emulators=false want_cudnn=false want_onnx_tests=false want_onnxruntime=false want_python=false want_mpi=false want_z3=false want_chromium=false only_check=false
for argument in "$@"; do
    case $argument in
    --ptxas) want_ptxas=true ;;
    --cudnn) want_cudnn=true ;;
    --onnx-tests) want_onnx_tests=true ;;
    --onnxruntime) want_onnxruntime=true ;;
    --python) want_python=true ;;
    --mpi) want_mpi=true ;;
    --z3) want_z3=true ;;
    --chromium) want_chromium=true ;;
    --emulators) want_emulators=true ;;
    --check) only_check=true ;;
    *) note "unknown argument $argument"; exit 2 ;;
    esac
done

lacking=$(missing)
if [[ -n $lacking ]]; then
    note "missing:"
    sed 's/^/  - /' <<<"$lacking" >&2
    $only_check && exit 1
    if ! command -v apt-get >/dev/null; then
        explain
        exit 1
    fi
    install_llvm
    lacking=$(missing)
    if [[ -n $lacking ]]; then
        note "still missing after the installation:"
        sed 's/^/  - /' <<<"$lacking" >&2
        exit 1
    fi
fi
if $want_ptxas && path=$(ptxas_path); then
    echo "export FRIT_PTXAS=$path"
fi
if $want_ptxas && path=$(nvrtc_path); then
    echo "export FRIT_NVRTC=$path"
fi
if $want_cudnn && path=$(cudnn_path); then
    echo "export FRIT_CUDNN=$path"
fi
if $want_onnx_tests && path=$(onnx_tests_path); then
    echo "export FRIT_ONNX_TESTS=$path"
fi
if $want_onnxruntime && path=$(packages_path onnxruntime "${FRIT_ONNXRUNTIME:-}" "${ONNXRUNTIME_PACKAGES[@]}"); then
    echo "export FRIT_ONNXRUNTIME=$path"
fi
if $want_python && path=$(packages_path python "${FRIT_PYTHON:-}" "${PYTHON_PACKAGES[@]}"); then
    echo "export FRIT_PYTHON=$path"
fi
if $want_mpi && has_mpi; then
    echo "export FRIT_MPI=1"
fi
if $want_z3 && path=$(z3_path); then
    echo "export FRIT_Z3=$path"
fi
if $want_chromium && path=$(chromium_path); then
    echo "export FRIT_CHROMIUM=$path"
fi
if $want_emulators && has_emulators; then
    echo "export FRIT_EMULATORS=1"
fi
