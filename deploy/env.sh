# Sourced by the scripts beside it: where the checkout is, which Python runs it, and what every process needs set.
# TANDEM_PYTHON names an interpreter that has tandem's packages already; then nothing is installed.
# A file or socket that a process opens would get the number of a closed stream, and log lines would be written into it.
for stream in 0 1 2; do
    if [ -d "/proc/$$/fd" ] && ! [ -e "/proc/$$/fd/$stream" ]; then eval "exec $stream<>/dev/null"; fi
done
root="$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
case "$root" in
    *:*)
        echo "$root: the path has a colon, at which PYTHONPATH would be divided: move the checkout" >&2
        exit 2
        ;;
esac
if [ -z "${TANDEM_PYTHON:-}" ]; then
    "$root/deploy/setup"
fi
python="${TANDEM_PYTHON:-$root/.venv/bin/python}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1  # modules come from the checkout and the environment, never from the current directory
export PYTHONUTF8=1  # cluster files are UTF-8, and names of files and what is printed may be, whatever the locale is
export OMP_WAIT_POLICY=PASSIVE  # several processes share the cores: a spinning OpenMP worker takes the others' time
export OPENBLAS_NUM_THREADS=1  # numpy, with which nothing is multiplied, would start a thread per core in every process
