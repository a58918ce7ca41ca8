#!/usr/bin/env bash
# On a machine with one H200: a whole cluster serves the 8B shape under loads through HTTP. Results go to $OUT.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
url=http://127.0.0.1:8000

cluster() { # NAME MODEL PREFILL_TOKENS DECODE_TOKENS DTYPE
    cat >"/tmp/$1.yaml" <<YAML
model: {path: $2, served_name: $1, dtype: $5}
prefill: {nodes: [{name: prefill-0, device: "cuda:0"}], pool_tokens: $3, chunk_tokens: 8192}
decode: {nodes: [{name: decode-0, device: "cuda:0"}], pool_tokens: $4, max_running: 64}
process: {run_dir: /tmp/run-$1}
YAML
    timeout 60 python3 -m deploy.cli up "/tmp/$1.yaml" --detach 2>&1 | tail -5
}
stop() {
    timeout 40 python3 -m deploy.cli down "/tmp/$1.yaml" 2>&1 | tail -2
    grep -h '"graphs"' /tmp/run-"$1"/logs/*.log | cut -c1-300
    no_errors "/tmp/run-$1"
}
look() { # ID TOKENS
    python3 -c "import json; print(json.dumps({'prompt': [(i * 7919 + $2) % 99000 + 20 for i in range($2)],
        'max_tokens': 16, 'temperature': 0, 'ignore_eos': True}))" |
        curl -sf $url/v1/completions -H "X-Request-Id: $1" -H 'Content-Type: application/json' -d @- >"/tmp/answer-$1"
    expect tokens "/tmp/answer-$1" 16
    curl -sf "$url/requests/$1" | tee -a "$out/timelines.jsonl"
    echo
}

date
timeout 60 python3 -m deploy.tiny_models.constructed /tmp/m8b --device cuda 2>&1 | tail -3
cluster m8b /tmp/m8b 131072 393216 bfloat16
timeout 60 python3 -m tests.bench.serve $url --input 512 --output 128 --concurrency 1 4 16 64 --vocab 100000 \
    --json "$out/serve-h200.json" 2>&1 | tail -8
for input in 64 128 512 1024 2048; do
    timeout 15 python3 -m tests.bench.serve $url --input $input --output 2 --concurrency 1 --vocab 100000 --seed $input \
        --json "$out/ttft-$input.json" 2>&1 | tail -1
done
for tokens in 64 512 2048; do look "alone-$tokens" $tokens; done
timeout 15 python3 -m tests.bench.serve $url --input 512 --output 128 --concurrency 64 --requests 128 --vocab 100000 \
    --seed 9 >/dev/null 2>&1 &
sleep 2.5
look beside-load 512
wait
curl -sf $url/server_info >"$out/server_info.json"
expect replays "$out/server_info.json"
stop m8b

for dtype in bfloat16 float32; do
    echo "== tiny model, $dtype"
    cluster tiny "$PWD/deploy/tiny_models/tiny-target" 32768 65536 $dtype
    for shots in 0 8; do
        timeout 30 python3 -m deploy.eval_cli $url --count 200 --seed 5 --shots $shots --json "$out/eval-$dtype-$shots.json" 2>&1 |
            tail -1
        expect score "$out/eval-$dtype-$shots.json" 0.9
    done
    stop tiny
done
sleep 1
if pgrep -f 'decode_node|prefill_node|deploy.cli'; then
    echo "these processes outlived their cluster"
    failed=1
fi
ls /dev/shm | head -3 || true
nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader
date
