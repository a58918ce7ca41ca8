#!/usr/bin/env bash
# On a machine with two GPUs: the 8B shape with prefill on one and decode on the other, through HTTP, under synthetic traces
# of Mooncake's kinds (tests/bench/placement_traces.py): long prompts, most of which begin with the history of a conversation
# or with instructions that others share. CASES: of plain, eagle3, fp8. TRACES: of agents, conversation. RATE (default: that
# of the published trace), TRACE_SECONDS and SEEDS say how much is measured; prompts over MAX_INPUT tokens are left out. A
# case takes 30 s to start and TRACE_SECONDS plus some 15 for each trace and seed. Results go to $OUT; env.sh explains GPUS
# and PORT.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
file=deploy/clusters/h200-x2.yaml
long="$models/m8b-long"
common=(--set "model.path=$long" --set model.served_name=m8b)
eagle3=(--set speculation.algorithm=eagle3 --set "speculation.draft_model_path=$long-eagle3" --set speculation.steps=3)
fp8=(--set model.quantization=fp8 --set kv.dtype=fp8)
declare -A cases=([plain]="" [eagle3]="${eagle3[*]}" [fp8]="${fp8[*]}")
seconds="${TRACE_SECONDS:-60}"

trace_of() { # CASE TRACE SEED
    local name="$1-$2-$3"
    python3 -m tests.bench.placement_traces "$2" "$run/$2-$3.jsonl" ${RATE:+--rate "$RATE"} --seconds "$seconds" --seed "$3"
    local code=0
    timeout $((seconds + 60)) python3 -m deploy.bench_cli "$url" --trace "$run/$2-$3.jsonl" --seeds 1 --vocab 99000 \
        --max-input "${MAX_INPUT:-60000}" --json "$out/traces-$name.json" >"$out/traces-$name.log" 2>&1 || code=$?
    sed "s/^/$name: /" "$out/traces-$name.log" | tail -12
    return "$code"
}

date
nvidia-smi -L
if ! test -e "$long/config.json"; then
    python3 -m deploy.tiny_models.constructed "$long" --draft "$long-eagle3" --max-positions 65536 --device cuda | tail -1
fi
for name in ${CASES:-plain fp8}; do
    echo "$SECONDS s: $name"
    # shellcheck disable=SC2086
    start_cluster "$name" 120 "$file" "${common[@]}" ${cases[$name]}
    for kind in ${TRACES:-agents}; do
        for seed in ${SEEDS:-1 2 3}; do
            trace_of "$name" "$kind" "$seed"
        done
    done
    # shellcheck disable=SC2086
    stop_cluster "$name" "$file" "${common[@]}" ${cases[$name]}
    expect no_fallbacks "$out/server_info-$name.json"
done
date
