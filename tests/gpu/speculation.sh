#!/usr/bin/env bash
# On a machine with one H200: the word problems with each draft of the tiny target, questions about pictures, and the accept
# lengths; what was replayed and what was not. See bring_up.sh.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cluster() { # MODEL ALGORITHM DRAFT
    cat >/tmp/spec.yaml <<YAML
model: {path: $PWD/deploy/tiny_models/$1, served_name: tiny, dtype: float32}
prefill: {nodes: [{name: prefill-0, device: "cuda:0"}], pool_tokens: 32768, chunk_tokens: 2048}
decode: {nodes: [{name: decode-0, device: "cuda:0"}], pool_tokens: 65536, max_running: 32}
speculation: {algorithm: $2$3}
process: {run_dir: /tmp/run-spec}
YAML
    timeout 60 python3 -m deploy.cli up /tmp/spec.yaml --detach 2>&1 | tail -4
}
stop() { # MIN_ACCEPT_LENGTH
    curl -sf http://127.0.0.1:8000/server_info >"$out/server_info-spec.json"
    expect replays "$out/server_info-spec.json"
    expect accepts "$out/server_info-spec.json" "$1"
    python3 -c '
import json, sys
info = json.load(sys.stdin)
print("accept length", info["internal_states"][0]["avg_spec_accept_length"])
for node in info["nodes"]:
    for graph in node["counters"]["graphs"]:
        print(node["name"], {key: graph[key] for key in ("phase", "model", "replays", "fallbacks", "captured")})' <"$out/server_info-spec.json"
    python3 -m deploy.cli down /tmp/spec.yaml 2>&1 | tail -1
    no_errors /tmp/run-spec
}
for algorithm in none ngram eagle3 eagle mtp standalone tree; do
    draft=", draft_model_path: $PWD/deploy/tiny_models/tiny-${algorithm/tree/eagle3}"
    case "$algorithm" in none | ngram) draft="" ;; tree) draft="$draft, topk: 4, draft_tokens: 8" ;; esac
    echo "== $algorithm"
    cluster tiny-target "${algorithm/tree/eagle3}" "$draft"
    timeout 40 python3 -m deploy.eval_cli http://127.0.0.1:8000 --count 100 --seed 5 --shots 8 --json "$out/$algorithm.json" 2>&1 | tail -2
    expect score "$out/$algorithm.json" 0.95
    case "$algorithm" in none) stop 1.0 ;; ngram) stop 1.2 ;; *) stop 2.5 ;; esac
done
echo "== pictures"
cluster tiny-vision eagle3 ", draft_model_path: $PWD/deploy/tiny_models/tiny-vision-eagle3"
timeout 40 python3 -m deploy.eval_cli http://127.0.0.1:8000 --vision --count 100 --seed 5 --json "$out/vision.json" 2>&1 | tail -2
expect score "$out/vision.json" 0.9
stop 2.5
