#!/usr/bin/env bash
# On a machine with one H200: the steps of both nodes without sockets, then what the first load after start-up meets.
# Results go to $OUT.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
url=http://127.0.0.1:8000

date
tests 150 tests/gpu/test_compilations.py tests/gpu/test_piecewise.py
# Prompts run under breakable graphs, piecewise graphs by both compilers, and without graphs, on the same weights.
timeout 280 python3 -m tests.bench.engine --json "$out/engine-h200.json" 2>&1 | tail -60
date
timeout 60 python3 -m deploy.tiny_models.constructed /tmp/m8b --device cuda 2>&1 | tail -1
cat >/tmp/load.yaml <<YAML
model: {path: /tmp/m8b, served_name: m8b, dtype: bfloat16}
prefill: {nodes: [{name: prefill-0, device: "cuda:0"}], pool_tokens: 131072, chunk_tokens: 8192}
decode: {nodes: [{name: decode-0, device: "cuda:0"}], pool_tokens: 393216, max_running: 64}
process: {run_dir: /tmp/run-load}
YAML
timeout 90 python3 -m deploy.cli up /tmp/load.yaml --detach 2>&1 | tail -2
timeout 40 python3 -m tests.bench.serve $url --input 512 --output 32 --concurrency 1 --vocab 99000 2>&1 | tail -1
for index in $(seq 16); do
    python3 -c "import json; print(json.dumps({'prompt': [(i * 7919 + $index) % 99000 + 20 for i in range(512)],
        'max_tokens': 32, 'temperature': 0, 'ignore_eos': True}))" >/tmp/body-"$index"
done
for round in 1 2; do
    for index in $(seq 16); do
        sed "s/, [0-9]*]/, 7$round]/" /tmp/body-"$index" |
            curl -sf $url/v1/completions -H "X-Request-Id: r$round-$index" -H 'Content-Type: application/json' -d @- >"/tmp/answer-$index" &
    done
    wait
    for index in $(seq 16); do expect tokens "/tmp/answer-$index" 32; done
    for index in $(seq 16); do curl -sf "$url/requests/r$round-$index" && echo; done >>"$out/timelines.jsonl"
done
timeout 40 python3 -m tests.bench.serve $url --input 512 --output 64 --concurrency 4 16 64 --vocab 99000 --seed 4 2>&1 | tail -3
curl -sf $url/server_info >"$out/server_info-load.json"
expect replays "$out/server_info-load.json"
timeout 40 python3 -m deploy.cli down /tmp/load.yaml 2>&1 | tail -1
no_errors /tmp/run-load
date
