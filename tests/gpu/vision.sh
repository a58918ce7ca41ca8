#!/usr/bin/env bash
# On a machine with one H200: prompts with an image, the encoder and the first token after it, graphs on and off; then
# the tiny vision model through HTTP. Results go to $OUT.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

date
tests 120 tests/gpu/test_vision.py
for tower in llava-1.5 qwen2.5-vl; do
    timeout 120 python3 -m tests.bench.vision_engine --towers $tower --json "$out/vision-engine-$tower-h200.json" 2>&1 | tail -8
done
date
for graphs in breakable none; do
    cat >/tmp/vision.yaml <<YAML
model: {path: $PWD/deploy/tiny_models/tiny-vision, served_name: tiny-vision}
prefill: {nodes: [{name: prefill-0, device: "cuda:0"}], pool_tokens: 32768, chunk_tokens: 2048, graphs: $graphs}
decode: {nodes: [{name: decode-0, device: "cuda:0"}], pool_tokens: 65536, max_running: 32}
process: {run_dir: /tmp/run-vision}
YAML
    timeout 60 python3 -m deploy.cli up /tmp/vision.yaml --detach 2>&1 | tail -2
    timeout 40 python3 -m tests.bench.vision http://127.0.0.1:8000 --json "$out/vision-$graphs-h200.json" 2>&1 | tail -1
    curl -sf http://127.0.0.1:8000/server_info >"$out/server_info-vision-$graphs.json"
    expect replays "$out/server_info-vision-$graphs.json"
    timeout 40 python3 -m deploy.cli down /tmp/vision.yaml 2>&1 | tail -1
    grep -h '"warmed up"' /tmp/run-vision/logs/*.log | cut -c1-300
    no_errors /tmp/run-vision
done
date
