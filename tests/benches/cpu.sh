#!/usr/bin/env bash
# Builds Frit and its Python package in release, gets PyTorch, transformers and diffusers (about 3 GB) into target/cpu-bench, and runs cpu.py
# there with the arguments given: cpu.sh --help. PYTHON names an interpreter that has them already.
set -euo pipefail
cd "$(dirname "$0")/../.."

cargo build --release --quiet -p frit -p frit-python
folder=$PWD/target/cpu-bench
mkdir -p "$folder/frit"
cp compiler/python/frit/*.py "$folder/frit/"
ln -sf "$PWD/target/release/lib_frit.so" "$folder/frit/_frit.abi3.so"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$folder/venv/bin/python
    if [ ! -x "$PYTHON" ]; then
        python3 -m venv "$folder/venv"
        "$PYTHON" -m pip install --quiet numpy torch transformers diffusers onnx onnxscript
    fi
fi
PYTHONPATH=$folder exec "$PYTHON" tests/benches/cpu.py --frit target/release/frit "$@"
