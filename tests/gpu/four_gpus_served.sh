#!/usr/bin/env bash
# On a machine with four GPUs joined by NVLink: two prefill and two decode ranks through HTTP, in FP8. PARTS: of qwen35
# (the shape of Qwen3.5-35B-A3B with its MTP module), plain and eagle3 (the 70B shape). RATES, LOAD_SECONDS and SEEDS say how
# much is measured. Results go to $OUT. It expects the checkpoints that `write_checkpoints` of ranks.sh writes.
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

qwen35() {
    local file=deploy/clusters/h200-x4-qwen3.5-35b-a3b.yaml
    local sets=("model.path=$models/qwen35" "speculation.draft_model_path=$models/qwen35" model.served_name=qwen35
        model.max_model_len=16384 decode.max_running=32)
    up qwen35 $file "${sets[@]}"
    curl -s -m 60 $url/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"messages": [{"role": "user", "content": "What is 6 times 7?"}], "max_tokens": 24, "temperature": 0}'
    echo
    load qwen35
    down qwen35 $file "${sets[@]}"
    expect accepts "$out/server_info-qwen35.json" 2.0
}
common=("model.path=$models/m70b" model.quantization=fp8 model.served_name=m70b prefill.memory_fraction=0.85
    decode.memory_fraction=0.85 decode.max_running=64)
plain() {
    up 70b-plain deploy/clusters/h200-x4.yaml "${common[@]}"
    load 70b-plain
    down 70b-plain deploy/clusters/h200-x4.yaml "${common[@]}"
}
eagle3() {
    local sets=("${common[@]}" speculation.algorithm=eagle3 "speculation.draft_model_path=$models/m70b-eagle3"
        speculation.steps=3 speculation.draft_quantization=fp8)
    up 70b-eagle3 deploy/clusters/h200-x4.yaml "${sets[@]}"
    load 70b-eagle3
    down 70b-eagle3 deploy/clusters/h200-x4.yaml "${sets[@]}"
    expect accepts "$out/server_info-70b-eagle3.json" 2.0
}

date
for each in ${PARTS:-qwen35 plain eagle3}; do
    "$each"
done
date
