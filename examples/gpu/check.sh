#!/usr/bin/env bash
# Checks and times Frit on a GPU, out of a folder that prepare.sh made. Needs the NVIDIA driver, Python 3.11 or later
# with PyTorch (whose wheels bring the CUDA libraries) and safetensors; compute-sanitizer where there is one.
#
#   check.sh [STAGE] [--deadline SECONDS] [--out DIR] [--from DIR] [--only TEXT] [--without TEXT] [--again TEXT] [--jobs N]
#
# STAGE is machine, smoke, first, correctness, train, time, ranks, sanitize, table (of what is known), or all. All are
# ordered by how much they say: if both smoke tests fail, nothing else is run. With --deadline everything ends so many
# seconds from the start with the table written; what runs then is ended, and its row says so. Results go to DIR (default
# $OUT, else check-out): results.json and the table gpu.md, written after every row, log.txt with what failed, and
# carried.tar.gz with compiled kernels and chosen algorithms. Another call with the same DIR, or with that of an earlier
# call in --from, goes on from there: good rows are not made again, nor those that failed with the same kit, unless --again
# names them; those that the deadline ended are. --only makes the rows whose name holds TEXT, --without leaves out those
# whose stage and name do; --jobs says how many rows of smoke, correctness and sanitize are made at once. Exit code 1 if a
# row failed.
set -euo pipefail
# The deadline counts from here.
export CHECK_BEGAN=$EPOCHREALTIME
exec "${PYTHON:-python3}" "$(dirname "$0")/check.py" "$@"
