#!/usr/bin/env bash
# On a machine with two GPUs: a movable node that decodes the 8B shape beside a prefill node, with short prompts computed on
# prefill nodes only and where they are decoded. First, tests/gpu/test_movable.py. LIMITS: values of router.local_prefill.
# RATE, LONG_RATE, LOAD_SECONDS and SEEDS say how much is measured. Results go to $OUT.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
url=http://127.0.0.1:8000

date
nvidia-smi -L
tests 240 tests/gpu/test_movable.py
test -e /tmp/m8b/config.json ||
    timeout 90 python3 -m deploy.tiny_models.constructed /tmp/m8b --device cuda 2>&1 | tail -1
cat >/tmp/movable.yaml <<YAML
model: {path: /tmp/m8b, served_name: m8b, dtype: bfloat16}
prefill: {nodes: [{name: prefill-0, device: "cuda:0"}, {name: flex-0, device: "cuda:1"}], chunk_tokens: 8192}
decode: {nodes: [{name: flex-0, device: "cuda:1"}], max_running: 128}
movable: {nodes: [{name: flex-0, role: decode}]}
process: {run_dir: /tmp/run-movable}
YAML
for limit in ${LIMITS:-0 256}; do
    echo "$SECONDS s: router.local_prefill $limit"
    timeout 200 python3 -m deploy.cli up /tmp/movable.yaml --set "router.local_prefill=$limit" --detach 2>&1 | tail -3
    timeout 300 python3 -m tests.bench.local_prefill $url --rate "${RATE:-8}" --long-rate "${LONG_RATE:-4}" \
        --seconds "${LOAD_SECONDS:-30}" --seeds "${SEEDS:-2}" --json "$out/local-prefill-$limit.json" 2>&1 | tail -8
    curl -sf -m 20 $url/server_info >"$out/server_info-local-$limit.json"
    timeout 60 python3 -m deploy.cli down /tmp/movable.yaml --set "router.local_prefill=$limit" 2>&1 | tail -1
    cp /tmp/run-movable/logs/flex-0.log "$out/flex-0-$limit.log" 2>/dev/null || true
    no_errors /tmp/run-movable
    expect no_fallbacks "$out/server_info-local-$limit.json"
done
date
