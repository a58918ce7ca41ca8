#!/usr/bin/env bash
# On a machine with one H200, through HTTP, both nodes on the GPU, default settings: 200 word problems by 200 clients at
# once, 200 clients with answers of 2,048 tokens from the 8B shape with EAGLE-3, and the times to the first token
# of its prompts with and without prompt graphs. Results go to $OUT.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
url=http://127.0.0.1:8000
eagle3="--set speculation.algorithm=eagle3 --set speculation.steps=3"
up() { # NAME MODEL ARGUMENT...
    local name="$1" model="$2"
    shift 2
    timeout 120 python3 -m deploy.cli up deploy/clusters/h200.yaml --set "model.path=$model" \
        --set "process.run_dir=/tmp/run-$name" "$@" --detach 2>&1 | tail -3
}
down() { # NAME MODEL ARGUMENT...
    local name="$1" model="$2"
    shift 2
    curl -sf -m 20 $url/server_info >"$out/server_info-$name.json"
    timeout 40 python3 -m deploy.cli down deploy/clusters/h200.yaml --set "model.path=$model" \
        --set "process.run_dir=/tmp/run-$name" "$@" 2>&1 | tail -1
    no_errors "/tmp/run-$name"
}

date
tiny="$PWD/deploy/tiny_models/tiny-target"
# shellcheck disable=SC2086
up questions "$tiny" $eagle3 --set "speculation.draft_model_path=$PWD/deploy/tiny_models/tiny-eagle3"
timeout 60 python3 -m deploy.eval_cli $url --count 200 --seed 5 --concurrency 200 --json "$out/questions.json" 2>&1 | tail -1
# shellcheck disable=SC2086
down questions "$tiny" $eagle3 --set "speculation.draft_model_path=$PWD/deploy/tiny_models/tiny-eagle3"
expect score "$out/questions.json" 0.9
expect no_fallbacks "$out/server_info-questions.json"
expect accepts "$out/server_info-questions.json" 1.5

timeout 90 python3 -m deploy.tiny_models.constructed /tmp/m8b --draft /tmp/m8b-eagle3 --device cuda 2>&1 | tail -1
for graphs in auto none; do
    up "$graphs" /tmp/m8b --set "prefill.graphs=$graphs"
    for input in 64 128 512 1024; do
        timeout 20 python3 -m tests.bench.serve $url --input $input --output 2 --concurrency 1 --requests 40 --vocab 100000 \
            --seed $input --json "$out/first-token-$graphs-$input.json" 2>&1 | tail -1
    done
    down "$graphs" /tmp/m8b --set "prefill.graphs=$graphs"
done
expect sooner "$out/first-token-auto-128.json" "$out/first-token-none-128.json" 0.42

# shellcheck disable=SC2086
up long /tmp/m8b $eagle3 --set speculation.draft_model_path=/tmp/m8b-eagle3
timeout "${SECONDS_LONG:-240}" python3 -m tests.bench.serve $url --input 512 --output 2048 --concurrency 200 --requests 200 \
    --vocab 99000 --json "$out/long-answers.json" 2>&1 | tail -2
# shellcheck disable=SC2086
down long /tmp/m8b $eagle3 --set speculation.draft_model_path=/tmp/m8b-eagle3
expect no_fallbacks "$out/server_info-long.json"
date
