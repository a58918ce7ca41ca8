#!/usr/bin/env bash
# On a machine with two GPUs: host memory behind the prefix cache of a decode node. Conversations of 16,384 tokens of the
# 8B shape take turns, twice: 128 KiB per token, 2 GiB each, so that the pool holds four of them and host memory all ten.
# In the second round they must come from there. Then a profile of each node under load, which must have CUDA kernels.
# HOST_MIB and CONVERSATIONS say how much; with fewer MiB than all conversations take, none is found: they are used in
# turn, and the one used least recently is replaced. About 3 minutes. Results go to $OUT; env.sh explains GPUS and PORT.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
name=decode-tier file="$run/decode-tier.yaml"

profile() { # NODE: records a profile; keeps the kernels that took longest, not the trace
    local answer="$run/profile-$1.json" told="$out/profile-$1.json"
    curl -sf -m 100 --unix-socket "$run/$name/router.admin.sock" "http://localhost/workers/$1/profile" \
        -H 'Content-Type: application/json' -d '{"seconds": 8, "num_steps": 40}' >"$answer"
    timeout 60 python3 -m tests.gpu.trace_kernels "$answer" "$told"
    expect kernels "$told"
}

date
nvidia-smi -L
write_m8b
cat >"$file" <<YAML
model: {path: $models/m8b, served_name: m8b, dtype: bfloat16}
prefill: {nodes: [{name: prefill-0, device: "cuda:0"}], chunk_tokens: 8192}
decode:
  nodes: [{name: decode-0, device: "cuda:1"}]
  pool_tokens: 65536
  host_mib: ${HOST_MIB:-24576}
  backup_mib: 4096
YAML
echo "$SECONDS s: start"
start_cluster "$name" 150 "$file"
echo "$SECONDS s: conversations"
timeout 90 python3 -m tests.gpu.conversations "$url" --count "${CONVERSATIONS:-10}" --json "$out/decode-tier.json"
expect tier "$out/decode-tier.json" decode-0
echo "$SECONDS s: profiles"
timeout 90 python3 -m deploy.bench_cli "$url" --concurrency 16 --requests 2000 --seeds 1 --input 1024 --output 256 \
    --vocab 99000 >"$out/profile-load.log" 2>&1 &
load=$!
sleep 5
profile decode-0
profile prefill-0
kill "$load" 2>/dev/null || true
wait "$load" || true
echo "$SECONDS s: stop"
stop_cluster "$name" "$file"
date
