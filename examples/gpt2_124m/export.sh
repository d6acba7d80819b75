#!/usr/bin/env bash
# Exports GPT-2 124M (12 layers, 768 wide, 50257 tokens, context 1024) with random weights, and random token data.
#
#   examples/gpt2_124m/export.sh [DIR] [SEQ]     default: /tmp/gpt2_124m, 128 tokens
#
# Needs Python with torch, transformers, onnx, onnxscript, safetensors; writes about 500 MB. PYTHON names another python3.
set -euo pipefail
dir=${1:-/tmp/gpt2_124m}
seq=${2:-128}
exec "${PYTHON:-python3}" "$(dirname "$0")/../export/export_gpt2.py" "$dir/model.onnx" --seq "$seq" \
    --data "$dir/data.safetensors" --batches 20 --batch 4
