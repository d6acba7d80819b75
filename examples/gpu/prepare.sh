#!/usr/bin/env bash
# Puts all that check.sh needs on a GPU machine into one folder and one archive of it, KIT.tar.gz: the lean frit-run, stripped, plans, data, what the
# same models give on the CPU, and the scripts themselves. Needs neither a GPU nor the CUDA toolkit.
#
#   examples/gpu/prepare.sh [--arch sm_90] [--device cuda|cpu] [--tiny] [KIT]      KIT: gpu-kit
#
# --device cpu makes plans for this machine, and --tiny small models instead of those that are timed: with both,
# check.sh can be run from start to end anywhere. FRIT and FRIT_RUN name the programs; without them they are built.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."

arch=sm_90 device=cuda tiny=false kit=gpu-kit
while [[ $# -gt 0 ]]; do
    case $1 in
    --arch) arch=$2; shift ;;
    --device) device=$2; shift ;;
    --tiny) tiny=true ;;
    -*) echo "prepare: unknown option $1" >&2; exit 2 ;;
    *) kit=$1 ;;
    esac
    shift
done
most_bytes=$((64 << 20))

if [[ -z ${FRIT:-} || -z ${FRIT_RUN:-} ]]; then
    cargo build --release --package frit --package frit-runtime
    target=${CARGO_TARGET_DIR:-target}/release
    FRIT=${FRIT:-$target/frit} FRIT_RUN=${FRIT_RUN:-$target/frit-run}
fi

rm -rf "$kit"
mkdir -p "$kit"/{bin,plans,data,references}
strip -o "$kit/bin/frit-run" "$FRIT_RUN"
cp "$here"/{check.sh,check.py,peer.py,make_models.py} "$kit"
cp examples/char_gpt2/data.bin "$kit/data/tokens.bin"
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
echo "{\"device\": \"$device\", \"arch\": \"$arch\", \"commit\": \"$commit\"}" > "$kit/kit.jsonl"

[[ $device == cpu ]] && arch=x86-64-v3
compile() { # PLAN MODEL BATCH [OPTION ...]
    local plan=$1 model=$2 batch=$3
    shift 3
    "$FRIT" compile "$model" --bind batch="$batch" -o "$plan" --set loss.logits=logits "$@" > "$kit/compile.log" 2>&1 || {
        cat "$kit/compile.log" >&2
        exit 1
    }
    rm -rf "$plan/source"
}

# One line of the kit: STAGE NAME MODEL PRECISION DATA BATCH RANKS.
entry() {
    printf '{"stage": "%s", "name": "%s", "model": "%s", "precision": "%s", "data": "%s", "batch": %d, "ranks": %d}\n' "$@" \
        >> "$kit/kit.jsonl"
}
target=(--set "target.device=$device" --set "target.arch=$arch")

# The given models, with what the CPU makes of them.
given() { # MODEL FILE DATA BATCH [OPTION ...], in each of $precisions
    local name=$1 file=$2 data=$3 batch=$4 precision
    shift 4
    local copy=data/$name.safetensors
    if [[ $data == *.bin ]]; then copy=data/tokens.bin; else cp "$data" "$kit/$copy"; fi
    for precision in $precisions; do
        local plan=$name-$precision
        compile "$kit/plans/$plan" "$file" "$batch" "${target[@]}" --set precision.compute=$precision "$@"
        # Both precisions start from the same weights.
        if [[ $precision != fp32 ]] && cmp -s "$kit/plans/$name-fp32/weights.safetensors" "$kit/plans/$plan/weights.safetensors"; then
            ln -sf "../$name-fp32/weights.safetensors" "$kit/plans/$plan/weights.safetensors"
        fi
        compile "$kit/reference" "$file" "$batch" --set target.device=cpu --set precision.compute=$precision "$@"
        mkdir "$kit/references/$plan"
        local validation=()
        [[ $data == *.bin ]] || validation=(--validation "$data")
        "$FRIT_RUN" "$kit/reference" --data "$data" --steps 5 --metrics "$kit/references/$plan/metrics.jsonl" \
            --dump-grads "$kit/references/$plan/grads.safetensors" "${validation[@]}" > /dev/null
        rm -r "$kit/reference"
        entry correctness "$plan" "$name" $precision "$copy" "$batch" 1
    done
}
for folder in tests/models/*/; do
    precisions="fp32 bf16"
    # Only these GPUs have units for it.
    [[ $folder == */gpt2/ || $folder == */llama/ ]] && [[ $arch != sm_8[06] ]] && precisions+=" fp8"
    name=$(basename "$folder")
    [[ -e $folder/model.onnx && $name != losses ]] || continue
    more=()
    [[ $name == unet ]] && more=(--set loss.kind=mse)
    given "$name" "$folder/model.onnx" "$folder/data.safetensors" 4 "${more[@]}"
done
precisions="fp32 bf16"
given adafactor tests/models/gpt2/model.onnx tests/models/gpt2/data.safetensors 4 --set optimizer.kind=adafactor
for name in attention_heads operations; do given $name "$here/$name.json" examples/char_gpt2/data.bin 2; done

models=$here
if $tiny; then
    models=$kit/models
    mkdir "$models"
    python3 "$here/make_models.py" --tiny "$models"
fi
seeded() { # STAGE MODEL PRECISION BATCH RANKS [OPTION ...]
    local stage=$1 model=$2 precision=$3 batch=$4 ranks=$5 data=data/tokens.bin
    shift 5
    local name=$model-$precision-$batch-$ranks
    [[ $model == resnet* ]] && data=images
    if [[ ! -d $kit/plans/$name ]]; then
        compile "$kit/plans/$name" "$models/$model.json" "$batch" "${target[@]}" --weights none \
            --set precision.compute="$precision" --set optimizer.lr=1e-4 --set sharding.ranks="$ranks" "$@"
        rm -r "$kit/plans/$name/eval"
    fi
    entry "$stage" "$name" "$model" "$precision" "$data" "$batch" "$ranks"
}
if $tiny; then
    small=gpt2_tiny timed=(gpt2_tiny:8 bert_tiny:8 resnet_tiny:8)
else
    small=gpt2_124m timed=(gpt2_124m:32 gpt2_774m:16 gpt2_1558m:8 bert_large:32 resnet50:256)
fi
for precision in fp32 bf16; do seeded train $small $precision 4 1; done
for model in "${timed[@]}"; do seeded time "${model%:*}" bf16 "${model#*:}" 1; done
for ranks in 1 2 4; do seeded ranks $small fp32 $((4 / ranks)) $ranks; done
for name in mlp-fp32 gpt2-bf16 resnet-bf16; do
    entry sanitize "$name" "${name%-*}" "${name#*-}" "data/${name%-*}.safetensors" 4 1
done

rm -f "$kit/compile.log"
tar -czf "$kit.tar.gz" -C "$(dirname "$kit")" "$(basename "$kit")"
bytes=$(stat -c %s "$kit.tar.gz")
echo "prepare: $kit.tar.gz holds $(ls "$kit/plans" | wc -l) plans for $device, $((bytes >> 10)) KiB"
if ((bytes > most_bytes)); then
    echo "prepare: that is more than the $((most_bytes >> 20)) MiB that are meant to travel" >&2
    exit 1
fi
