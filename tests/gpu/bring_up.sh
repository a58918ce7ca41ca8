#!/usr/bin/env bash
# On a machine with one H200: kernel and graph tests, then a whole cluster with the tiny model and with the 8B shape.
# Results go to $OUT. Packages come from PYTHONPATH; nothing is installed.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

echo "== kernels and graphs"
tests 110 -x tests/gpu/test_graphs.py tests/gpu/test_ops.py

cluster() { # NAME MODEL PREFILL_TOKENS DECODE_TOKENS DTYPE
    cat >"/tmp/$1.yaml" <<YAML
model: {path: $2, served_name: $1, dtype: $5}
prefill: {nodes: [{name: prefill-0, device: "cuda:0"}], pool_tokens: $3, chunk_tokens: 8192}
decode: {nodes: [{name: decode-0, device: "cuda:0"}], pool_tokens: $4, max_running: 64}
process: {run_dir: /tmp/run-$1}
YAML
    timeout 150 python3 -m deploy.cli up "/tmp/$1.yaml" --detach 2>&1 | tail -5
}
stop() {
    python3 -m deploy.cli down "/tmp/$1.yaml" 2>&1 | tail -2
    grep -h '"graphs"' /tmp/run-"$1"/logs/*.log | cut -c1-600
    no_errors "/tmp/run-$1"
}

echo "== tiny model, bf16"
cluster tiny "$PWD/deploy/tiny_models/tiny-target" 32768 65536 bfloat16
python3 -m deploy.eval_cli http://127.0.0.1:8000 --count 200 --seed 5 --shots 0 --json "$out/eval.json" 2>&1 | tail -3
expect score "$out/eval.json" 0.9
stop tiny

echo "== 8B shape, random weights"
time timeout 120 python3 -m deploy.tiny_models.constructed /tmp/m8b --device cuda 2>&1 | tail -3
cluster m8b /tmp/m8b 131072 393216 bfloat16
timeout 100 python3 -m tests.bench.serve http://127.0.0.1:8000 --input 512 --output 64 --concurrency 1 16 64 \
    --vocab 100000 --json "$out/serve_h200.json" 2>&1 | tail -8
curl -sf http://127.0.0.1:8000/server_info >"$out/server_info.json"
expect replays "$out/server_info.json"
curl -sf http://127.0.0.1:8000/v1/completions -H 'X-Request-Id: look' -H 'Content-Type: application/json' \
    -d '{"prompt": [100, 200, 300], "max_tokens": 16, "temperature": 0, "ignore_eos": true}' >"$out/answer.json"
expect tokens "$out/answer.json" 16
curl -sf http://127.0.0.1:8000/requests/look
stop m8b
