#!/usr/bin/env bash
# On a machine with two or four GPUs joined by NVLink: the way of a plan to ranks on an idle host, nodes of two ranks, sums over
# ranks, transfers between ranks, then the 70B shape over two and four ranks without HTTP. Results go to $OUT. PARTS: of ring,
# checks, sums, transfers, steps, rounds; with two GPUs all but checks and transfers. Beside the checks it writes checkpoints for
# four_gpus_served.sh to MODELS (/dev/shm: 211 GB; WRITE says which). LIMIT: seconds after which no part begins. Parts that need
# NIXL run where it is installed.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
limit="${LIMIT:-560}"
count="$(nvidia-smi -L | wc -l)"

part() { # GPUS NAME SECONDS MODULE ARGUMENTS...: runs a program on these GPUs; writes NAME.json and NAME.log
    local gpus="$1" name="$2" most="$3" left=$((limit - SECONDS))
    shift 3
    if test "$left" -lt 15; then
        echo "no time left for $name"
        return 1
    fi
    echo "$SECONDS s: $name"
    CUDA_VISIBLE_DEVICES="$gpus" timeout -k 5 "$((left < most ? left : most))" \
        python3 -m "$@" --json "$out/$name.json" >"$out/$name.log" 2>&1 || echo "$name ended with $?"
}
step() { # GPUS NAME RANKS QUANTIZATION BATCHES PROMPTS
    part "$1" "engine-70b-$2" 170 tests.bench.engine --shape llama-3.1-70b --ranks "$3" --quantization "$4" \
        --prompt-graphs breakable --prompts $6 --batches $5 --steps 40
}
round() { # GPUS NAME RANKS QUANTIZATION BATCHES
    part "$1" "rounds-70b-$2" 120 tests.bench.rounds --shape llama-3.1-70b --ranks "$3" --quantization "$4" \
        --draft-quantization "$4" --acceptance 0.8 --batch $5 --rounds 40
}

have_nixl() {
    python3 -c 'from kv_transfer.transport.nixl.agent import load_library; load_library()' 2>/dev/null
}
write_checkpoints() { # WRITE: which of m70b and qwen35
    local models="${MODELS:-/dev/shm}"
    df -h "$models"
    if [[ "${WRITE:-m70b qwen35}" == *m70b* ]]; then
        CUDA_VISIBLE_DEVICES=2 python3 -m deploy.tiny_models.constructed "$models/m70b" --hidden 8192 --layers 80 \
            --heads 64 --inter 28672 --draft "$models/m70b-eagle3" --acceptance 0.8 --device cuda
        echo "$SECONDS s: the checkpoint of the 70B shape is written"
    fi &
    if [[ "${WRITE:-m70b qwen35}" == *qwen35* ]]; then
        python3 -c "import json; from tests.bench.shapes import config_of; print(json.dumps(config_of('qwen3.5-35b-a3b')))" \
            >/tmp/qwen35.json
        CUDA_VISIBLE_DEVICES=3 python3 -m deploy.tiny_models.constructed "$models/qwen35" --config /tmp/qwen35.json \
            --module --acceptance 0.8 --device cuda
        echo "$SECONDS s: the checkpoint of Qwen3.5-35B-A3B's shape is written"
    fi
    wait
    du -sh "$models"/*
}
checks() {
    write_checkpoints >"$out/write.log" 2>&1 &
    (
        export CUDA_VISIBLE_DEVICES=2,3
        tests 280 tests/gpu/test_cuda_ipc.py
    ) >"$out/transfer-tests.log" 2>&1 &
    (
        export CUDA_VISIBLE_DEVICES=0,1 TANDEM_TEST_SECOND_GPU=cuda:1
        tests 70 -x tests/gpu/test_peer_reduce.py
        tests 170 -x tests/gpu/test_rank_cluster.py
        if have_nixl; then
            TANDEM_TEST_TRANSPORT=nixl tests 170 -x tests/gpu/test_rank_cluster.py
        fi
    ) >"$out/rank-tests.log" 2>&1
    wait
    tail -n 40 "$out"/{rank-tests,transfer-tests}.log
    tail -n 20 "$out/write.log"
    echo "$SECONDS s: the checks and the command beside them have ended"
}
ring() {
    timeout 30 python3 -m tests.bench.plan_ring --ranks "$count" 2>&1 | tee "$out/plan-ring.log"
}
sums() {
    part 0,1 all-reduce-2 60 tests.bench.all_reduce --ranks 2
    test "$count" -lt 4 || part 0,1,2,3 all-reduce-4 60 tests.bench.all_reduce --ranks 4
    tail -n 14 "$out"/all-reduce-?.log
}
transfers() {
    part 0,1 transfer-ranks 120 tests.bench.transfer --transports cuda_ipc --tokens 8192 --ranks 2x2 2x1 1x2 &
    if have_nixl; then
        part 2,3 transfer-ranks-nixl 120 tests.bench.transfer --transports nixl --tokens 8192 --ranks 2x2 2x1 1x2
    fi
    wait
    tail -n 30 "$out"/transfer-ranks*.log
}
steps() {
    local prompts="128 512 1024 2048 8192"
    test "$count" -lt 4 || step 0,1,2,3 bf16-tp4 4 none "1 4 16 64" "$prompts"
    step 0,1 fp8-tp2 2 fp8 "1 4 16 64" "$prompts" &
    test "$count" -ge 4 || wait
    step "$last_two" bf16-tp2 2 none "1 4 16 64" "$prompts"
    wait
    tail -n 30 "$out"/engine-70b-*.log
}
rounds() {
    test "$count" -lt 4 || round 0,1,2,3 bf16-tp4 4 none "1 4 16 64"
    round 0,1 fp8-tp2 2 fp8 "1 4 16 64" &
    test "$count" -ge 4 || wait
    round "$last_two" bf16-tp2 2 none "1 4 16 64"
    wait
    tail -n 12 "$out"/rounds-70b-*.log
}

date
nvidia-smi topo -m || true
parts="ring sums steps rounds" last_two=0,1
if test "$count" -ge 4; then
    parts="ring checks sums transfers steps rounds" last_two=2,3
fi
for each in ${PARTS:-$parts}; do
    "$each"
done
date
