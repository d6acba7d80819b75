#!/usr/bin/env bash
# Compiles the small GPT-2 for 4 ranks (bf16, fully sharded), shows the plan, trains it on the CPU and writes a report.
#
#   examples/demo.sh            needs target/release/frit; `make demo` builds it first
#
# FRIT names another frit, FRIT_DEMO_STEPS another number of steps, FRIT_DEMO_OUT another directory for the output.
set -euo pipefail
cd "$(dirname "$0")/.."

frit=${FRIT:-target/release/frit}
steps=${FRIT_DEMO_STEPS:-150}
out=${FRIT_DEMO_OUT:-demo-out}
example=examples/char_gpt2

[[ -x $frit ]] || { echo "demo: there is no $frit: run \`make build\`" >&2; exit 1; }

# Prints a command, then runs it.
run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

rm -rf "$out"
mkdir -p "$out"
run "$frit" compile $example/model.onnx --config $example/train.toml --bind batch=8 -o "$out/plan"
run "$frit" verify "$out/plan"
run "$frit" inspect "$out/plan"
run "$frit" run "$out/plan" --data $example/data.bin --steps "$steps" --metrics "$out/metrics.jsonl"
run "$frit" report "$out/plan" -o "$out/report.html"

# The value of a key in one line of the metrics.
value() { sed -n "s/.*\"$1\": *\([^,}]*\).*/\1/p"; }
first=$(head -n 1 "$out/metrics.jsonl" | value loss)
last=$(tail -n 1 "$out/metrics.jsonl" | value loss)
LC_ALL=C awk -v first="$first" -v last="$last" -v steps="$steps" 'BEGIN {
    printf "\nLoss after %d steps: %.3f, from %.3f.\n", steps, last, first
    exit !(last < first)
}' || { echo "demo: the loss did not fall" >&2; exit 1; }

cat <<TEXT

  $out/plan            the plan: plan.json, kernels, weights
  $out/metrics.jsonl   one line per step
  $out/report.html     timeline, memory, precision and units on one page

Next
  $frit inspect $out/plan --view units      what is gathered when, and which parameters train
  $frit inspect $out/plan --view casts      every cast, and the rule that put it there
  $frit inspect $out/plan --view memory     every buffer and the peak beside its lower bound
  $frit compile $example/model.onnx --config $example/train.toml --bind batch=8 --set precision.compute=fp32 -o $out/plan-fp32
TEXT
