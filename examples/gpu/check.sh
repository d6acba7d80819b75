#!/usr/bin/env bash
# Checks and times Frit on a GPU, out of a folder that prepare.sh made. Needs the NVIDIA driver, Python 3.10 or later
# with PyTorch (whose wheels bring the CUDA libraries) and safetensors; compute-sanitizer where there is one.
#
#   check.sh [correctness|train|time|ranks|sanitize|table|all] [--out DIR] [--from DIR] [--only TEXT] [--jobs N]
#
# Results go to DIR (default $OUT, else check-out), one JSON file per stage, written after every row: what is there
# from an earlier call, in DIR or in --from's, is not done again. --only does the rows whose name holds TEXT; --jobs
# says how many rows of correctness and sanitize are done at once.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/check.py" "$@"
