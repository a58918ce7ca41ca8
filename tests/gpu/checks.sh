#!/usr/bin/env bash
# On a machine with one or more H200s: runs every test of this folder, one process per file, all at once. With one GPU the
# tests whose ranks share it and take turns on it come last, one after another. With .whl/nixl.zip (made by
# tests/gpu/nixl_wheel.py; git ignores .whl, so copy it along) the tests of NIXL run too. Logs go to $OUT/checks.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
mkdir -p "$out/checks" /tmp/nixl
if test -e .whl/nixl.zip; then
    python3 -m zipfile -e .whl/nixl.zip /tmp/nixl
    export PYTHONPATH="$PYTHONPATH:/tmp/nixl"
fi
date
ranked=(tests/gpu/test_peer_reduce.py tests/gpu/test_rank_cluster.py)
if test "$(nvidia-smi -L | wc -l)" -ge 2; then
    export TANDEM_TEST_SECOND_GPU=cuda:1
    ranked=()
fi
check() {
    timeout "${SECONDS_EACH:-240}" python3 -m pytest -q "$1" -o filterwarnings=default -o asyncio_mode=auto \
        -p no:cacheprovider --durations=3 >"/tmp/$(basename "$1" .py).log" 2>&1
}
show() {
    local name
    name="$(basename "$1" .py)"
    echo "== $name: $(tail -1 "/tmp/$name.log")"
    grep -h '^FAILED\|^ERROR\|^E  ' "/tmp/$name.log" | cut -c1-200 | head -12 || true
}
declare -A running
for file in tests/gpu/test_*.py; do
    [[ " ${ranked[*]} " == *" $file "* ]] && continue
    check "$file" &
    running[$file]=$!
done
for file in "${!running[@]}"; do
    wait "${running[$file]}" || failed=1
    show "$file"
done
for file in "${ranked[@]}"; do
    check "$file" || failed=1
    show "$file"
done
tail -n 400 /tmp/test_*.log >"$out/checks/logs.txt" # one file: few may come back
date
