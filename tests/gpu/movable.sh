#!/usr/bin/env bash
# On a machine with two GPUs: a movable node that decodes the 8B shape beside a prefill node, with short prompts computed on
# prefill nodes only and where they are decoded. First, tests/gpu/test_movable.py. LIMITS: values of router.local_prefill.
# RATE, LONG_RATE, LOAD_SECONDS and SEEDS say how much is measured; TESTS=no leaves the test out. Results go to $OUT;
# env.sh explains GPUS and PORT.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

date
nvidia-smi -L
test "${TESTS:-yes}" = no || tests 240 tests/gpu/test_movable.py
write_m8b
cat >"$run/movable.yaml" <<YAML
model: {path: $models/m8b, served_name: m8b, dtype: bfloat16}
prefill: {nodes: [{name: prefill-0, device: "cuda:0"}, {name: flex-0, device: "cuda:1"}], chunk_tokens: 8192}
decode: {nodes: [{name: flex-0, device: "cuda:1"}], max_running: 128}
movable: {nodes: [{name: flex-0, role: decode}]}
YAML
for limit in ${LIMITS:-0 256}; do
    echo "$SECONDS s: router.local_prefill $limit"
    name="local-$limit"
    start_cluster "$name" 200 "$run/movable.yaml" --set "router.local_prefill=$limit"
    timeout 300 python3 -m tests.bench.local_prefill "$url" --rate "${RATE:-8}" --long-rate "${LONG_RATE:-4}" \
        --seconds "${LOAD_SECONDS:-30}" --seeds "${SEEDS:-2}" --json "$out/local-prefill-$limit.json" 2>&1 | tail -8
    stop_cluster "$name" "$run/movable.yaml" --set "router.local_prefill=$limit"
    cp "$run/$name/logs/flex-0.log" "$out/flex-0-$limit.log" 2>/dev/null || true
    expect no_fallbacks "$out/server_info-$name.json"
done
date
