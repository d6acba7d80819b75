#!/usr/bin/env bash
# From package descriptions to a model that summarizes them. `make build` makes the programs; README.md describes the steps.
#
#   examples/t5_summarize/run.sh [OUT]                  # t5-out
#   RANKS=1 examples/t5_summarize/run.sh                # the same steps of 64 pairs on one rank
#   STEPS=100 PAIRS=my.jsonl examples/t5_summarize/run.sh
#   GRAPH=examples/t5_summarize/t5_small.onnx examples/t5_summarize/run.sh t5-small-out
#
# A run that was interrupted goes on where it was if it is started again.
set -euo pipefail
cd "$(dirname "$0")/../.."

out=${1:-t5-out}
frit=${FRIT:-target/release/frit}
python=${PYTHON:-python3}
example=examples/t5_summarize
ranks=${RANKS:-4}
steps=${STEPS:-600}
every=$(((steps + 5) / 6))

[[ -x $frit ]] || { echo "run.sh: there is no $frit: run \`make build\`" >&2; exit 1; }
"$python" -c 'import numpy, onnx, onnxruntime, tokenizers' || {
    echo "run.sh: $python lacks packages: $python -m pip install -r $example/requirements.txt" >&2
    exit 1
}

# Prints a command, then runs it.
run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

# Data: pairs of this machine's packages, or those given, as padded tokens.
mkdir -p "$out"
if [[ ! -e $out/train.npz ]]; then
    pairs=${PAIRS:-$out/pairs.jsonl}
    [[ -e $pairs ]] || run "$python" $example/pairs.py "$pairs"
    run "$python" $example/prepare.py "$pairs" "$out" ${PREPARE:-}
fi

# Model: a graph without weights, and first values for them.
if [[ ! -e $out/plan ]]; then
    cp "${GRAPH:-$example/model.onnx}" "$out/model.onnx"
    run "$python" $example/weights.py "$out/model.onnx"
    run "$frit" compile "$out/model.onnx" --config $example/train.toml --bind batch=8 --set sharding.ranks="$ranks" \
        --set run.accumulation=$((8 / ranks)) --set schedule.total_steps="$steps" --set schedule.warmup_steps=$((steps / 10)) \
        -o "$out/plan"
fi

# Training, with a validation and a checkpoint every sixth of the steps; the best checkpoint is kept.
run "$frit" run "$out/plan" --data "$out/train.npz" --validation "$out/validation.npz" --steps "$steps" \
    --checkpoint "$out/checkpoints" --checkpoint-every "$every" --keep 2 --resume --metrics "$out/metrics.jsonl"

# Use: the best model as ONNX, in onnxruntime.
run "$frit" eval "$out/plan" --data "$out/validation.npz" --checkpoint "$out/checkpoints/best"
run "$frit" export "$out/checkpoints/best" --onnx "$out/summarizer.onnx"
run "$python" $example/summarize.py "$out"
