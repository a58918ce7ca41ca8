#!/usr/bin/env bash
# On a machine with one or two H200s: pages by nixl between pools on GPUs, beside cuda_ipc, and a cluster that uses it.
# Needs .whl/nixl.zip (made by tests/gpu/nixl_wheel.py; git ignores .whl, so copy it along). Results go to $OUT.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
mkdir -p /tmp/nixl
python3 -m zipfile -e .whl/nixl.zip /tmp/nixl
export PYTHONPATH="$PYTHONPATH:/tmp/nixl"
url=http://127.0.0.1:8000
last=$(($(python3 -c 'import torch; print(torch.cuda.device_count())') - 1))
test "$last" -gt 1 && last=1

python3 -c 'from kv_transfer.transport.nixl.agent import load_library; print(load_library().__file__)'
tests 200 -x tests/gpu/test_nixl.py
timeout 200 python3 -m tests.bench.transfer --transports nixl cuda_ipc --tokens 64 512 8192 \
    --json "$out/transfer-nixl.json" 2>&1 | tail -20
timeout 90 python3 -m deploy.tiny_models.constructed /tmp/m8b --draft /tmp/m8b-eagle3 --device cuda 2>&1 | tail -1
cat >/tmp/nixl.yaml <<YAML
model: {path: /tmp/m8b, served_name: m8b, dtype: bfloat16}
prefill: {nodes: [{name: prefill-0, device: "cuda:0"}], pool_tokens: 131072, chunk_tokens: 8192}
decode: {nodes: [{name: decode-0, device: "cuda:$last"}], pool_tokens: 131072, max_running: 64}
transfer: {transport: nixl}
security: {isolated_network: true}
process: {run_dir: /tmp/run-nixl}
YAML
timeout 150 python3 -m deploy.cli up /tmp/nixl.yaml --detach 2>&1 | tail -3
timeout 60 python3 -m tests.bench.serve $url --input 512 --output 128 --concurrency 1 16 --vocab 99000 \
    --json "$out/serve-nixl.json" 2>&1 | tail -3
curl -sf $url/server_info >"$out/server_info-nixl.json"
expect replays "$out/server_info-nixl.json"
timeout 40 python3 -m deploy.cli down /tmp/nixl.yaml 2>&1 | tail -1
no_errors /tmp/run-nixl
