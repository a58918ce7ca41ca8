# Sourced by the scripts beside it, in the repository root: where results go, and which Python every process runs.
set -u
out="${OUT:-/tmp/out}"
mkdir -p "$out"
export TANDEM_PYTHON PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
TANDEM_PYTHON="$(command -v python3)"
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
