#!/usr/bin/env bash
# On a machine with two H200s: pages over NVLink, then the 8B shape with prefill on one GPU and decode on the other.
# Results go to $OUT.
set -u
out="${OUT:-/tmp/out}"
mkdir -p "$out"
export TANDEM_PYTHON PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
TANDEM_PYTHON="$(command -v python3)"
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
url=http://127.0.0.1:8000

date
timeout 60 python3 -m deploy.models.constructed /tmp/m8b --device cuda 2>&1 | tail -1 &
timeout 90 python3 -m pytest -q -x tests/gpu/test_cuda_ipc.py -o filterwarnings=default -o asyncio_mode=auto \
    -p no:cacheprovider 2>&1 | tail -8
wait
cat >/tmp/x2.yaml <<YAML
model: {path: /tmp/m8b, served_name: m8b, dtype: bfloat16}
prefill: {nodes: [{name: prefill-0, device: "cuda:0"}], pool_tokens: 262144, chunk_tokens: 8192}
decode: {nodes: [{name: decode-0, device: "cuda:1"}], pool_tokens: 524288, max_running: 256, max_transferring: 128}
process: {run_dir: /tmp/run-x2}
YAML
timeout 90 python3 -m deploy.cli up /tmp/x2.yaml --detach 2>&1 | tail -3
date
timeout 60 python3 -m tests.bench.serve $url --input 512 --output 128 --concurrency 1 16 64 --vocab 99000 \
    --json "$out/serve-h200-x2.json" 2>&1 | tail -4
timeout 110 python3 -m tests.bench.serve $url --input 1024 --output 256 --rates 8 16 32 --seconds 20 --vocab 99000 \
    --seed 3 --json "$out/rates-h200-x2.json" 2>&1 | tail -4
for input in 128 512 2048; do
    timeout 15 python3 -m tests.bench.serve $url --input $input --output 2 --concurrency 1 --vocab 99000 --seed $input \
        2>&1 | tail -1
done
sleep 1
curl -s $url/server_info >"$out/server_info.json"
curl -s $url/metrics >"$out/metrics.txt"
timeout 40 python3 -m deploy.cli down /tmp/x2.yaml 2>&1 | tail -1
grep -hi '"error"\|Traceback\|Error\|warning' /tmp/run-x2/logs/*.log | cut -c1-400 | tail -8
tail -n 400 /tmp/run-x2/logs/prefill-0.log >"$out/prefill.log"
tail -n 400 /tmp/run-x2/logs/decode-0.log >"$out/decode.log"
date
