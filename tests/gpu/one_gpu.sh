#!/usr/bin/env bash
# On a machine with one H200: both nodes on it (deploy/clusters/h200.yaml), the 8B shape, plain and with EAGLE-3 and
# adaptive widths: Poisson arrivals, then clients that always wait for an answer. Results go to $OUT.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
url=http://127.0.0.1:8000

date
timeout 90 python3 -m deploy.tiny_models.constructed /tmp/m8b --draft /tmp/m8b-eagle3 --device cuda 2>&1 | tail -1
for name in plain eagle3; do
    args="--set model.path=/tmp/m8b --set process.run_dir=/tmp/run-$name"
    test $name = plain ||
        args="$args --set speculation.algorithm=eagle3 --set speculation.draft_model_path=/tmp/m8b-eagle3 --set speculation.steps=3 --set speculation.adaptive=auto"
    echo "== $name"
    # shellcheck disable=SC2086
    timeout 120 python3 -m deploy.cli up deploy/clusters/h200.yaml $args --detach 2>&1 | tail -3
    timeout 60 python3 -m tests.bench.serve $url --input 1024 --output 256 --rates ${RATES:-4 8} --seconds 12 --vocab 99000 \
        --seed 3 --json "$out/rates-h200-$name.json" 2>&1 | tail -3
    timeout 60 python3 -m tests.bench.serve $url --input 128 --output 384 --concurrency 8 32 96 --vocab 99000 \
        --json "$out/serve-h200-$name.json" 2>&1 | tail -3
    curl -sf $url/server_info >"$out/server_info-$name.json"
    expect replays "$out/server_info-$name.json"
    test $name = plain || expect accepts "$out/server_info-$name.json" 1.5
    # shellcheck disable=SC2086
    timeout 40 python3 -m deploy.cli down deploy/clusters/h200.yaml $args 2>&1 | tail -1
    no_errors /tmp/run-$name
done
date
