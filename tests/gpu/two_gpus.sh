#!/usr/bin/env bash
# On a machine with two H200s: pages over NVLink, then the 8B shape with prefill on one GPU and decode on the other.
# Results go to $OUT. LAYERS=true: pages leave layer by layer.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
url=http://127.0.0.1:8000

cluster() { # NAME SPECULATION
    cat >"/tmp/$1.yaml" <<YAML
model: {path: /tmp/m8b, served_name: m8b, dtype: bfloat16}
prefill: {nodes: [{name: prefill-0, device: "cuda:0"}], pool_tokens: 262144, chunk_tokens: 8192}
decode: {nodes: [{name: decode-0, device: "cuda:1"}], pool_tokens: 524288, max_running: 128, max_transferring: 128}
speculation: {$2}
transfer: {layers: ${LAYERS:-false}}
process: {run_dir: /tmp/run-$1}
YAML
    timeout 120 python3 -m deploy.cli up "/tmp/$1.yaml" --detach 2>&1 | tail -3
}
stop() {
    curl -sf $url/server_info >"$out/server_info-$1.json"
    expect replays "$out/server_info-$1.json"
    test "$1" = plain || expect accepts "$out/server_info-$1.json" 2.5
    curl -sf $url/metrics | grep -v '^#' >"$out/metrics-$1.txt"
    timeout 40 python3 -m deploy.cli down "/tmp/$1.yaml" 2>&1 | tail -1
    no_errors "/tmp/run-$1"
}

date
timeout 90 python3 -m deploy.tiny_models.constructed /tmp/m8b --draft /tmp/m8b-eagle3 --device cuda 2>&1 | tail -1
test -n "${SKIP_TESTS:-}" || tests 90 -x tests/gpu/test_cuda_ipc.py
# This includes a forward whose pages leave layer by layer, compared with one whose pages leave after it.
timeout 150 python3 -m tests.bench.transfer --transports cuda_ipc --tokens 1024 2048 8192 \
    --json "$out/transfer-layers.json" 2>&1 | tail -60
for name in plain eagle3; do
    speculation="algorithm: none"
    test $name = plain || speculation="algorithm: eagle3, draft_model_path: /tmp/m8b-eagle3, steps: 3"
    echo "== $name"
    cluster $name "$speculation"
    timeout 60 python3 -m tests.bench.serve $url --input 512 --output 128 --concurrency 1 16 64 --vocab 99000 \
        --json "$out/serve-h200-x2-$name.json" 2>&1 | tail -4
    timeout 100 python3 -m tests.bench.serve $url --input 1024 --output 256 --rates 16 32 --seconds 12 --vocab 99000 \
        --seed 3 --json "$out/rates-h200-x2-$name.json" 2>&1 | tail -3
    for input in 128 512 2048; do
        timeout 15 python3 -m tests.bench.serve $url --input $input --output 2 --concurrency 1 --vocab 99000 --seed $input \
            2>&1 | tail -1
    done
    curl -sf $url/server_info | python3 -c 'import json, sys; print(json.load(sys.stdin)["internal_states"])'
    stop $name
done
date
