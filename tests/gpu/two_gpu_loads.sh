#!/usr/bin/env bash
# On a machine with two GPUs: the 8B shape with prefill on one and decode on the other, through HTTP, under Poisson
# arrivals of 1,024 tokens in and 256 out; every gap of every request counts. CASES: of plain, eagle3, fp8, fp8-eagle3.
# RATES, LOAD_SECONDS and SEEDS say how much is measured. Results go to $OUT.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
url=http://127.0.0.1:8000
file=deploy/clusters/h200-x2.yaml
common=(--set model.path=/tmp/m8b --set model.served_name=m8b)
eagle3=(--set speculation.algorithm=eagle3 --set speculation.draft_model_path=/tmp/m8b-eagle3 --set speculation.steps=3)
fp8=(--set model.quantization=fp8 --set kv.dtype=fp8)
declare -A cases=(
    [plain]="" [eagle3]="${eagle3[*]}" [fp8]="${fp8[*]}"
    [fp8-eagle3]="${fp8[*]} ${eagle3[*]} --set speculation.draft_quantization=fp8"
)

date
nvidia-smi -L
test -e /tmp/m8b/config.json ||
    timeout 90 python3 -m deploy.tiny_models.constructed /tmp/m8b --draft /tmp/m8b-eagle3 --device cuda 2>&1 | tail -1
# shellcheck disable=SC2086,SC2046
for name in ${CASES:-plain eagle3 fp8}; do
    settings="${cases[$name]}"
    echo "$SECONDS s: $name"
    timeout 120 python3 -m deploy.cli up "$file" "${common[@]}" $settings --set "process.run_dir=/tmp/run-$name" \
        --detach 2>&1 | tail -2
    timeout 560 python3 -m deploy.bench_cli $url $(printf -- '--rate %s ' ${RATES:-16 32}) --seconds "${LOAD_SECONDS:-60}" \
        --seeds "${SEEDS:-3}" --input 1024 --output 256 --vocab 99000 --json "$out/loads-$name.json" 2>&1 | tail -14
    curl -sf -m 20 $url/server_info >"$out/server_info-$name.json"
    curl -sf -m 20 $url/metrics | grep -v '^#' >"$out/metrics-$name.txt"
    timeout 40 python3 -m deploy.cli down "$file" "${common[@]}" $settings --set "process.run_dir=/tmp/run-$name" 2>&1 |
        tail -1
    no_errors "/tmp/run-$name"
    expect no_fallbacks "$out/server_info-$name.json"
done
date
