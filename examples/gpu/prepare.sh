#!/usr/bin/env bash
# Puts all that check.sh needs on a GPU machine into one folder and one archive of it, KIT.tar.xz: the lean frit-run (with
# symbols, for the stacks of what hangs), plans, data, what the same models give on the CPU, llm.c's program, and the scripts
# themselves. Needs neither a GPU nor the CUDA toolkit.
#
#   examples/gpu/prepare.sh [--arch sm_90] [--device cuda|cpu] [--tiny] [--llmc CHECKOUT|none] [KIT]      KIT: gpu-kit
#
# --device cpu makes plans for this machine, and --tiny small models instead of those that are timed: with both,
# check.sh can be run from start to end anywhere. llm.c is cloned from GitHub unless --llmc names a checkout of it; where it
# cannot be had or built, its rows in the table say why. FRIT and FRIT_RUN name the programs; without them they are built.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."

arch=sm_90 device=cuda tiny=false llmc=() kit=gpu-kit
while [[ $# -gt 0 ]]; do
    case $1 in
    --arch) arch=$2; shift ;;
    --device) device=$2; shift ;;
    --tiny) tiny=true ;;
    --llmc) llmc=("$2"); shift ;;
    -*) echo "prepare: unknown option $1" >&2; exit 2 ;;
    *) kit=$1 ;;
    esac
    shift
done
# Of the archive, so that there is room for what an earlier call carried back.
most_bytes=$((24 << 20))

if [[ -z ${FRIT:-} || -z ${FRIT_RUN:-} ]]; then
    cargo build --release --package frit --package frit-runtime
    target=${CARGO_TARGET_DIR:-target}/release
    FRIT=${FRIT:-$target/frit} FRIT_RUN=${FRIT_RUN:-$target/frit-run}
fi

rm -rf "$kit"
mkdir -p "$kit"/{bin,plans,data,references}
strip --strip-debug -o "$kit/bin/frit-run" "$FRIT_RUN"
cp "$here"/{check.sh,check.py,rows.py,process.py,table.py,tensors.py,peer.py,llmc.py,make_models.py} "$kit"
cp examples/char_gpt2/data.bin "$kit/data/characters.bin"
# The smallest vocabulary of those that are timed has them all.
python3 "$here/make_models.py" --tokens "$kit/data/tokens.bin" $($tiny && echo 131 || echo 30522)
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
git diff --quiet HEAD 2>/dev/null || commit+=+

# llm.c's program, or why it is not there.
without=
if [[ $device == cpu || ${llmc[0]:-} == none ]]; then
    without="it was not asked for"
elif ! said=$("$here/llmc.sh" --arch "$arch" ${llmc[0]:+--source "${llmc[0]}"} "$kit/llm.c" 2>&1); then
    without=$(tail -1 <<< "$said")
    echo "prepare: $without" >&2
fi
python3 -c 'import json, sys; print(json.dumps(dict(zip(("device", "arch", "commit", "llm.c"), sys.argv[1:]))))' \
    "$device" "$arch" "$commit" "$without" > "$kit/kit.jsonl"

[[ $device == cpu ]] && arch=x86-64-v3
compile() { # PLAN MODEL BATCH [OPTION ...]
    local plan=$1 model=$2 batch=$3
    shift 3
    local logits=(--set loss.logits=logits)
    [[ "$*" == *loss.logits=* ]] && logits=()
    "$FRIT" compile "$model" --bind batch="$batch" -o "$plan" "${logits[@]}" "$@" > "$kit/compile.log" 2>&1 || {
        echo "prepare: $model does not compile" >&2
        cat "$kit/compile.log" >&2
        exit 1
    }
    rm -rf "$plan/source"
}

# One line of the kit: STAGE NAME MODEL PRECISION DATA BATCH RANKS [OF], OF the entry of which it is a variant without peers.
entry() {
    printf '{"stage": "%s", "name": "%s", "model": "%s", "precision": "%s", "data": "%s", "batch": %d, "ranks": %d'"${8:+, \"of\": \"$8\"}"'}\n' \
        "${@:1:7}" >> "$kit/kit.jsonl"
}
target=(--set "target.device=$device" --set "target.arch=$arch")

# The given models, with what the CPU makes of them.
given() { # MODEL FILE DATA BATCH [OPTION ...], in each of $precisions
    local name=$1 file=$2 data=$3 batch=$4 precision
    shift 4
    local copy=data/$name.safetensors
    if [[ $data == *.bin ]]; then copy=data/characters.bin; else cp "$data" "$kit/$copy"; fi
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
        # Digits far below the tolerances would only make the archive larger.
        python3 "$here/tensors.py" "$kit/references/$plan/grads.safetensors" $([[ $precision == fp32 ]] && echo 12 || echo 15)
        rm -r "$kit/reference"
        entry correctness "$plan" "$name" $precision "$copy" "$batch" 1
    done
}
for folder in tests/models/*/; do
    name=$(basename "$folder")
    more=()
    case $name in
    vae | diffusion) more=(--set loss.kind=output --set loss.logits=loss) ;;
    unet) more=(--set loss.kind=mse) ;;
    esac
    # Those with PyTorch's gradients, and two that draw random numbers.
    [[ -e $folder/grads.safetensors || $name == vae || $name == diffusion ]] || continue
    precisions="fp32 bf16"
    # Only these GPUs have units for it.
    [[ $name == gpt2 || $name == llama ]] && [[ $device == cuda && $arch != sm_8[06] ]] && precisions+=" fp8"
    given "$name" "$folder/model.onnx" "$folder/data.safetensors" 4 "${more[@]}"
done
precisions="fp32 bf16"
given adafactor tests/models/gpt2/model.onnx tests/models/gpt2/data.safetensors 4 --set optimizer.kind=adafactor
# Sums and statistics whose bits do not depend on the number of ranks.
given reproducible tests/models/gpt2/model.onnx tests/models/gpt2/data.safetensors 2 --set run.reproducible=2
for name in attention_heads operations; do given $name "$here/$name.json" examples/char_gpt2/data.bin 2; done

models=$here
if $tiny; then
    models=$kit/models
    mkdir "$models"
    python3 "$here/make_models.py" --tiny "$models"
fi
seeded() { # STAGE MODEL PRECISION BATCH RANKS [OPTION ...], called $variant if that is not empty
    local stage=$1 model=$2 precision=$3 batch=$4 ranks=$5 data=data/tokens.bin
    shift 5
    local of=$model-$precision-$batch-$ranks
    local name=$of${variant:+-$variant}
    [[ $model == resnet* ]] && data=images
    if [[ ! -d $kit/plans/$name ]]; then
        compile "$kit/plans/$name" "$models/$model.json" "$batch" "${target[@]}" --weights none \
            --set precision.compute="$precision" --set optimizer.lr=1e-4 --set sharding.ranks="$ranks" "$@"
        rm -r "$kit/plans/$name/eval"
    fi
    entry "$stage" "$name" "$model" "$precision" "$data" "$batch" "$ranks" ${variant:+"$of"}
}
if $tiny; then
    small=gpt2_tiny timed=(gpt2_tiny:8 bert_tiny:8 resnet_tiny:8)
else
    small=gpt2_124m timed=(gpt2_124m:32 gpt2_1558m:16 gpt2_774m:16 bert_large:32 resnet50:256)
fi
for precision in fp32 bf16; do seeded train $small $precision 4 1; done
for model in "${timed[@]}"; do seeded time "${model%:*}" bf16 "${model#*:}" 1; done
# With the residual stream in bf16, as llm.c has it.
for model in "${timed[@]:0:2}"; do
    variant=residual seeded time "${model%:*}" bf16 "${model#*:}" 1 --set precision.residual=compute
done
# The same weights and examples on one rank and on two, with sums of the library's and reproducible ones.
for ranks in 1 2; do
    two=("${target[@]}" --set precision.compute=fp32 --set sharding.ranks=$ranks)
    compile "$kit/plans/gpt2-ranks-$ranks" tests/models/gpt2/model.onnx $((4 / ranks)) "${two[@]}"
    entry ranks gpt2-ranks-$ranks gpt2 fp32 data/gpt2.safetensors $((4 / ranks)) $ranks
    compile "$kit/plans/reproducible-ranks-$ranks" tests/models/gpt2/model.onnx 1 "${two[@]}" --set run.reproducible=4
    entry ranks reproducible-ranks-$ranks reproducible fp32 data/gpt2.safetensors 1 $ranks
done
for name in mlp-fp32 gpt2-bf16 resnet-bf16; do
    entry sanitize "$name" "${name%-*}" "${name#*-}" "data/${name%-*}.safetensors" 4 1
done

rm -f "$kit/compile.log"
XZ_OPT=-9e tar -cJf "$kit.tar.xz" -C "$(dirname "$kit")" "$(basename "$kit")"
bytes=$(stat -c %s "$kit.tar.xz")
echo "prepare: $kit.tar.xz holds $(ls "$kit/plans" | wc -l) plans for $device, $((bytes >> 10)) KiB"
if ((bytes > most_bytes)); then
    echo "prepare: that is more than the $((most_bytes >> 20)) MiB that are meant to travel" >&2
    exit 1
fi
