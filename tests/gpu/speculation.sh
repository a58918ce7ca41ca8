#!/usr/bin/env bash
# On a machine with one H200: the word problems with each draft of the tiny target, and the accept length. See bring_up.sh.
set -u
out="${OUT:-/tmp/out}"
mkdir -p "$out"
export TANDEM_PYTHON PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
TANDEM_PYTHON="$(command -v python3)"
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
for algorithm in none ngram eagle3 eagle mtp standalone; do
    draft=""
    case "$algorithm" in none | ngram) ;; *) draft=", draft_model_path: $PWD/deploy/models/tiny-$algorithm" ;; esac
    cat >/tmp/spec.yaml <<YAML
model: {path: $PWD/deploy/models/tiny-target, served_name: tiny, dtype: float32}
prefill: {nodes: [{name: prefill-0, device: "cuda:0"}], pool_tokens: 32768, chunk_tokens: 2048}
decode: {nodes: [{name: decode-0, device: "cuda:0"}], pool_tokens: 65536, max_running: 32}
speculation: {algorithm: $algorithm$draft}
process: {run_dir: /tmp/run-spec}
YAML
    echo "== $algorithm"
    timeout 60 python3 -m deploy.cli up /tmp/spec.yaml --detach 2>&1 | tail -4
    timeout 40 python3 -m deploy.eval_cli http://127.0.0.1:8000 --count 100 --seed 5 --shots 8 --json "$out/$algorithm.json" 2>&1 | tail -2
    curl -s http://127.0.0.1:8000/server_info | python3 -c 'import json, sys; print(json.load(sys.stdin)["internal_states"][0]["avg_spec_accept_length"])'
    python3 -m deploy.cli down /tmp/spec.yaml 2>&1 | tail -1
    grep -h '"error"\|Traceback\|Error' /tmp/run-spec/logs/*.log | cut -c1-300 | tail -5
done
