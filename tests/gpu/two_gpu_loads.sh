#!/usr/bin/env bash
# On a machine with two GPUs: the 8B shape with prefill on one and decode on the other, through HTTP, under Poisson
# arrivals of 1,024 tokens in and 256 out; every gap of every request counts. CASES: of plain, eagle3, fp8, fp8-eagle3.
# RATES, LOAD_SECONDS and SEEDS say how much is measured. A line for each rate and seed is printed as soon as the rate is
# done; a rate that would not be done within LIMIT seconds (550) of the script's start fails without being begun. One rate
# of one case with three seeds takes 250 to 300 s. With SEARCH=1 a search for the highest rate at which 99 % of requests keep
# 200 ms and 15 ms takes their place: it begins with the first one of RATES, goes up to MAX_RATE and has as many probes as
# fit in LIMIT. SET: further settings of the clusters, as in SET="router.first_token_hold_ms=10
# prefill.chunk_tokens=4096"; values have no spaces. FILE: another cluster file; with deploy/clusters/h200.yaml both nodes
# share one GPU, as SET="process.gpu_sharing=decode_first" says. Results go to $OUT; env.sh explains GPUS and PORT.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
file="${FILE:-deploy/clusters/h200-x2.yaml}"
common=(--set "model.path=$models/m8b" --set model.served_name=m8b)
read -ra further <<<"${SET:-}"
for setting in "${further[@]}"; do
    common+=(--set "$setting")
done
eagle3=(--set speculation.algorithm=eagle3 --set "speculation.draft_model_path=$models/m8b-eagle3" --set speculation.steps=3)
fp8=(--set model.quantization=fp8 --set kv.dtype=fp8)
declare -A cases=(
    [plain]="" [eagle3]="${eagle3[*]}" [fp8]="${fp8[*]}"
    [fp8-eagle3]="${fp8[*]} ${eagle3[*]} --set speculation.draft_quantization=fp8"
)
seconds="${LOAD_SECONDS:-60}" seeds="${SEEDS:-3}"

rate_of() { # CASE RATE: measures one rate with all seeds; prints its lines
    local name="$1-$2" most=$((seeds * (seconds + 10) + 20))
    if test $((SECONDS + most)) -gt "${LIMIT:-550}"; then
        echo "no time left for $name: it may take $most s"
        return 1
    fi
    curl -sf -m 20 "$url/metrics" >"$run/before.txt"
    local code=0
    timeout "$most" python3 -m deploy.bench_cli "$url" --rate "$2" --seconds "$seconds" --seeds "$seeds" --input 1024 \
        --output 256 --vocab 99000 --json "$out/loads-$name.json" >"$out/loads-$name.log" 2>&1 || code=$?
    test "$code" = 0 || tail -12 "$out/loads-$name.log"
    curl -sf -m 20 "$url/metrics" >"$run/after.txt"
    python3 -m tests.gpu.load_lines "$1" "$out/loads-$name.json" "$run/before.txt" "$run/after.txt"
    return "$code"
}

search_of() { # CASE RATE: searches for the highest rate within the limits, beginning with RATE
    # Answers may take 4 s within the limits, late ones 5 s more, and a server that was overloaded 60 s to recover.
    local name="$1-search" probe=$((seeds * (seconds + 10)))
    local probes=$(((${LIMIT:-550} - SECONDS - 80) / probe))
    if test "$probes" -lt 1; then
        echo "no time left for $name: a probe may take $probe s"
        return 1
    fi
    local code=0
    timeout $((probes * probe + 80)) python3 -m deploy.bench_cli "$url" --search --rate "$2" \
        --max-rate "${MAX_RATE:-1024}" --max-probes "$probes" --seconds "$seconds" --seeds "$seeds" --input 1024 \
        --output 256 --vocab 99000 --json "$out/loads-$name.json" \
        >"$out/loads-$name.log" 2>&1 || code=$?
    sed "s/^/$1: /" "$out/loads-$name.log"
    return "$code"
}

date
nvidia-smi -L
write_m8b
# shellcheck disable=SC2086
for name in ${CASES:-plain eagle3 fp8}; do
    settings="${cases[$name]}"
    echo "$SECONDS s: $name ${further[*]}"
    start_cluster "$name" 120 "$file" "${common[@]}" $settings
    for rate in ${RATES:-16 32}; do
        if test "${SEARCH:-0}" = 1; then
            search_of "$name" "$rate"
            break
        fi
        rate_of "$name" "$rate"
    done
    stop_cluster "$name" "$file" "${common[@]}" $settings
    expect no_fallbacks "$out/server_info-$name.json"
done
date
