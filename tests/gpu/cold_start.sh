#!/usr/bin/env bash
# On a machine with one H200: how long a cluster takes to start with an empty cache of compiled kernels (cold) and with a
# full one (warm). The 8B shape with its EAGLE-3 head, both nodes on the GPU, in bf16 and with weights and pages in FP8.
# About 4 minutes. Results go to $OUT: /server_info has the seconds of every phase; env.sh explains PORT and MODELS.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
file=deploy/clusters/h200.yaml
eagle3="--set speculation.algorithm=eagle3 --set speculation.steps=3"
fp8="--set model.quantization=fp8 --set kv.dtype=fp8"

measure() { # NAME CACHE [ARGUMENT...]: starts a cluster whose kernels are in the directory CACHE, and stops it
    local name="$1" began
    export TRITON_CACHE_DIR="$2"
    shift 2
    # shellcheck disable=SC2086
    set -- --set "model.path=$models/m8b" $eagle3 --set "speculation.draft_model_path=$models/m8b-eagle3" "$@"
    began="$(date +%s%N)"
    start_cluster "$name" 200 "$file" "$@"
    echo "$name: ready after $((($(date +%s%N) - began) / 1000000)) ms" | tee -a "$out/cold-start.txt"
    stop_cluster "$name" "$file" "$@"
    expect replays "$out/server_info-$name.json"
}

date
nvidia-smi -L
write_m8b
rm -rf "$run"/kernels{,-fp8}
measure cold "$run/kernels"
measure warm "$run/kernels"
# shellcheck disable=SC2086
measure fp8-cold "$run/kernels-fp8" $fp8
# shellcheck disable=SC2086
measure fp8-warm "$run/kernels-fp8" $fp8
date
