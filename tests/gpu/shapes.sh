#!/usr/bin/env bash
# On a machine with one or two H200s: prompts, steps and rounds of the shapes of Qwen3-30B-A3B and Qwen3.5-35B-A3B, with
# weights constructed on the device. Results go to $OUT. With two GPUs each has one shape, and the hand-over of the
# second shape's states is measured between them. LIMIT: seconds after which no part begins or continues.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
limit="${LIMIT:-420}"

part() { # NAME SECONDS MODULE ARGUMENTS...: runs one program for at most so long, and writes NAME.json and NAME.log
    local name="$1" most="$2" left=$((limit - SECONDS))
    shift 2
    if test "$left" -lt 20; then
        echo "no time left for $name"
        return 1
    fi
    timeout "$((left < most ? left : most))" python3 -m "$@" --json "$out/$name.json" >"$out/$name.log" 2>&1
}
shape() { # NAME ALGORITHMS...: on the visible GPU
    local name="$1" algorithm
    shift
    part "engine-$name" 150 tests.bench.engine --shape "$name" --prompt-graphs breakable \
        --prompts 128 512 2048 8192 --batches 1 4 16 64 --kernels 1 64 2048 || failed=1
    for algorithm in "$@"; do
        part "rounds-$name-$algorithm" 120 tests.bench.rounds --shape "$name" --algorithm "$algorithm" \
            --acceptance 0.7 --batch 1 4 16 64 || failed=1
    done
    return "$failed"
}

date
if test "$(nvidia-smi --list-gpus | wc -l)" -gt 1; then
    CUDA_VISIBLE_DEVICES=0 shape qwen3-30b-a3b eagle3 &
    first=$!
    CUDA_VISIBLE_DEVICES=1 shape qwen3.5-35b-a3b mtp eagle3 &
    second=$!
    wait "$first"
    wait "$second"
    part transfer-qwen3.5-35b-a3b 80 tests.bench.transfer --shape qwen3.5-35b-a3b --transports cuda_ipc \
        --tokens 512 2048 8192
else
    shape qwen3.5-35b-a3b mtp
    shape qwen3-30b-a3b eagle3
fi
for log in "$out"/*.log; do
    echo "== $(basename "$log")"
    tail -60 "$log"
done
date
