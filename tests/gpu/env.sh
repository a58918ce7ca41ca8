# Sourced by the scripts beside it, in the repository root. Sets where results go, which Python every process runs, and
# when a script fails: it names each failing command (also one whose output is piped), continues, so that clusters are
# stopped and later parts measured, and ends with exit code 1.
#
# Scripts that start clusters with `start_cluster` can run side by side on one machine, each with other values of:
# GPUS: the GPUs that it sees, as in "2 3"; to it they are cuda:0 and cuda:1. Default: all.
# PORT: of its router, the only TCP port that its cluster listens on. Default: 8000.
# RUN: the directory for its cluster files and run directories. Default: /tmp/tandem-gpu-PORT.
# OUT: the directory for results. It may be the same one for different scripts.
# MODELS: the directory for checkpoints, /tmp; it may be the same one for all.
set -u -E -o pipefail
failed=0
trap 'failed=1; echo "FAILED, line $LINENO: $BASH_COMMAND"' ERR
trap 'status=$?; test "$failed" = 0 || status=1; exit "$status"' EXIT
out="${OUT:-/tmp/out}"
mkdir -p "$out"
export TANDEM_PYTHON PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE OPENBLAS_NUM_THREADS=1
TANDEM_PYTHON="$(command -v python3)"
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
port="${PORT:-8000}"
url="http://127.0.0.1:$port"
run="${RUN:-/tmp/tandem-gpu-$port}"
models="${MODELS:-/tmp}"
mkdir -p "$run"
if test -n "${GPUS:-}"; then
    export CUDA_VISIBLE_DEVICES="${GPUS// /,}"
fi

tests() { # SECONDS ARGUMENTS...: pytest on a machine that has no plugins of this project's tests
    local seconds="$1"
    shift
    timeout "$seconds" python3 -m pytest -q "$@" -o filterwarnings=default -o asyncio_mode=auto -p no:cacheprovider 2>&1 |
        tail -30
}
no_errors() { # RUN_DIRECTORY: shows warnings and errors of all logs; fails where there is an error
    local pattern='"level": *"(error|critical)"|Traceback'
    ls "$1"/logs/*.log >/dev/null || return 1
    grep -hE "$pattern|\"level\": *\"warning\"" "$1"/logs/*.log | cut -c1-400 | tail -12 || true
    ! grep -qhE "$pattern" "$1"/logs/*.log || return 1
}
expect() { # see expect.py
    python3 -m tests.gpu.expect "$@"
}
start_cluster() { # NAME SECONDS FILE [ARGUMENT...]: starts a cluster at $url, in the run directory $run/NAME
    local name="$1" seconds="$2" file="$3"
    shift 3
    timeout "$seconds" python3 -m deploy.cli up "$file" --set "router.port=$port" --set "process.run_dir=$run/$name" \
        "$@" --detach 2>&1 | tail -3
}
stop_cluster() { # NAME FILE [ARGUMENT...]: keeps /server_info and /metrics, stops a cluster, and looks for errors in its logs
    local name="$1" file="$2"
    shift 2
    curl -sf -m 20 "$url/server_info" >"$out/server_info-$name.json"
    curl -sf -m 20 "$url/metrics" | grep -v '^#' >"$out/metrics-$name.txt"
    timeout 60 python3 -m deploy.cli down "$file" --set "router.port=$port" --set "process.run_dir=$run/$name" \
        "$@" 2>&1 | tail -1
    no_errors "$run/$name"
}
write_m8b() { # the 8B shape and its EAGLE-3 head: written once, by the script that comes first; others wait for it
    (
        flock -w 150 9
        if test -e "$models/m8b/config.json" && test -e "$models/m8b-eagle3/config.json"; then
            exit 0
        fi
        rm -rf "$models"/m8b{,-eagle3}{,.part}
        timeout 120 python3 -m deploy.tiny_models.constructed "$models/m8b.part" --draft "$models/m8b-eagle3.part" \
            --device cuda 2>&1 | tail -1 || exit 1
        mv "$models/m8b-eagle3.part" "$models/m8b-eagle3" && mv "$models/m8b.part" "$models/m8b"
    ) 9>"$models/m8b.lock"
}
