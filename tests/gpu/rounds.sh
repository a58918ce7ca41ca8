#!/usr/bin/env bash
# On a machine with one H200: tests of graphs and kernels, then rounds and steps of the 8B shape without sockets.
# Results go to $OUT.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
date
test -n "${SKIP_TESTS:-}" || tests 200 tests/gpu --deselect tests/gpu/test_cuda_ipc.py
date
timeout 150 python3 -m tests.bench.rounds --acceptance 0.7 --batch 1 4 16 32 64 128 --json "$out/rounds-h200.json" 2>&1 | tail -20
date
timeout 280 python3 -m tests.bench.engine --kernels 1 16 64 512 --json "$out/engine-h200.json" 2>&1 | tail -180
date
