#!/usr/bin/env bash
# On a machine with four GPUs joined by NVLink: nodes of two ranks, sums over ranks, transfers between ranks, then the 70B
# shape over two and four ranks without HTTP. Results go to $OUT. Meanwhile checkpoints are written to /dev/shm for
# four_gpus_served.sh, which is to run next; WRITE=: leaves that out. LIMIT: seconds after which no part begins.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
limit="${LIMIT:-560}"

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
steps() { # GPUS NAME RANKS QUANTIZATION BATCHES PROMPTS
    part "$1" "engine-70b-$2" 130 tests.bench.engine --shape llama-3.1-70b --ranks "$3" --quantization "$4" \
        --prompt-graphs breakable --prompts $6 --batches $5 --steps 40
}
rounds() { # GPUS NAME RANKS QUANTIZATION BATCHES
    part "$1" "rounds-70b-$2" 90 tests.bench.rounds --shape llama-3.1-70b --ranks "$3" --quantization "$4" \
        --draft-quantization "$4" --acceptance 0.8 --batch $5 --rounds 40
}

date
nvidia-smi topo -m || true
bash -c "${WRITE-:}" >"$out/write.log" 2>&1 &
writing=$!
(
    export CUDA_VISIBLE_DEVICES=0,1 TANDEM_TEST_SECOND_GPU=cuda:1
    tests 70 -x tests/gpu/test_peer_reduce.py
    tests 170 -x tests/gpu/test_rank_cluster.py
) >"$out/rank-tests.log" 2>&1
tail -n 40 "$out/rank-tests.log"
wait "$writing" || echo "writing checkpoints has failed"
echo "$SECONDS s: checkpoints are written"
part 0,1 all-reduce-2 60 tests.bench.all_reduce --ranks 2
part 0,1,2,3 all-reduce-4 60 tests.bench.all_reduce --ranks 4
part 0,1 transfer-ranks 50 tests.bench.transfer --transports cuda_ipc --tokens 2048 8192 --ranks 2x2 2x1 1x2 &
timeout 30 python3 -m tests.bench.plan_ring --ranks 4 >"$out/plan-ring.log" 2>&1
wait
steps 0,1,2,3 bf16-tp4 4 none "1 4 16 64" "128 512 1024 2048 8192"
steps 0,1 fp8-tp2 2 fp8 "1 4 16 64" "128 512 1024 2048 8192" &
steps 2,3 bf16-tp2 2 none "1 4 16" "128 512 1024 2048" &
wait
rounds 0,1,2,3 bf16-tp4 4 none "1 4 16 64"
rounds 0,1 fp8-tp2 2 fp8 "1 4 16 64" &
rounds 2,3 bf16-tp2 2 none "1 4" &
wait
for log in all-reduce-2 all-reduce-4 transfer-ranks plan-ring engine-70b-bf16-tp4 engine-70b-fp8-tp2 engine-70b-bf16-tp2 \
    rounds-70b-bf16-tp4 rounds-70b-fp8-tp2 rounds-70b-bf16-tp2 write; do
    echo "== $log"
    tail -n 45 "$out/$log.log"
done
date
