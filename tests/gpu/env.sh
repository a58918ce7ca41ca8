# Sourced by the scripts beside it, in the repository root. Sets where results go, which Python every process runs, and
# when a script fails: it names each failing command (also one whose output is piped), continues, so that clusters are
# stopped and later parts measured, and ends with exit code 1.
set -u -E -o pipefail
failed=0
trap 'failed=1; echo "FAILED, line $LINENO: $BASH_COMMAND"' ERR
trap 'status=$?; test "$failed" = 0 || status=1; exit "$status"' EXIT
out="${OUT:-/tmp/out}"
mkdir -p "$out"
export TANDEM_PYTHON PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
TANDEM_PYTHON="$(command -v python3)"
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH

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
