#!/usr/bin/env bash
# On a machine with four GPUs joined by NVLink, after four_gpus.sh, which writes the checkpoints: two prefill and two
# decode ranks through HTTP. The 70B shape in FP8, plain and with EAGLE-3. Results go to $OUT. RATES, LOAD_SECONDS, SEEDS.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
url=http://127.0.0.1:8000
models="${MODELS:-/dev/shm}"

up() { # NAME FILE SETTING...
    local name="$1" file="$2" sets=()
    shift 2
    for setting in "$@"; do sets+=(--set "$setting"); done
    echo "$SECONDS s: $name starts"
    timeout 200 python3 -m deploy.cli up "$file" "${sets[@]}" --set "process.run_dir=/tmp/run-$name" --detach 2>&1 | tail -5
    echo "$SECONDS s: $name is up"
}
down() { # NAME FILE SETTING...
    local name="$1" file="$2" sets=()
    shift 2
    for setting in "$@"; do sets+=(--set "$setting"); done
    curl -sf -m 20 $url/server_info >"$out/server_info-$name.json"
    curl -sf -m 20 $url/metrics | grep -v '^#' >"$out/metrics-$name.txt"
    timeout 60 python3 -m deploy.cli down "$file" "${sets[@]}" --set "process.run_dir=/tmp/run-$name" 2>&1 | tail -1
    cp /tmp/run-"$name"/logs/*.log "$out/" 2>/dev/null || true
    no_errors "/tmp/run-$name"
    expect no_fallbacks "$out/server_info-$name.json"
}
load() { # NAME
    # shellcheck disable=SC2046
    timeout 400 python3 -m deploy.bench_cli $url $(printf -- '--rate %s ' ${RATES:-2 4}) --seconds "${LOAD_SECONDS:-60}" \
        --seeds "${SEEDS:-1}" --input 1024 --output 256 --vocab 99000 --json "$out/rates-$1.json" 2>&1 | tail -12
}

date
file=deploy/clusters/h200-x4.yaml
common=("model.path=$models/m70b" "model.quantization=fp8" "model.served_name=m70b" "prefill.memory_fraction=0.85"
    "decode.memory_fraction=0.85" "decode.max_running=64")
up 70b-plain $file "${common[@]}"
load 70b-plain
down 70b-plain $file "${common[@]}"
drafted=("${common[@]}" speculation.algorithm=eagle3 "speculation.draft_model_path=$models/m70b-eagle3" speculation.steps=3
    speculation.draft_quantization=fp8)
up 70b-eagle3 $file "${drafted[@]}"
load 70b-eagle3
down 70b-eagle3 $file "${drafted[@]}"
expect accepts "$out/server_info-70b-eagle3.json" 2.0
date
