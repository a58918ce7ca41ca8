# Sourced by the other scripts in deploy/: finds the checkout and its Python, and sets the variables of every process.
# TANDEM_PYTHON names an interpreter that already has tandem's packages; then nothing is installed.
# Opens standard streams that are closed: otherwise a file or socket would take such a number and receive log lines.
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
export OPENBLAS_NUM_THREADS=1  # numpy would start a thread per core in every process, though it multiplies nothing here
