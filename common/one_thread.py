"""The environment of child processes in which libraries use one thread, whatever the number of cores."""

from __future__ import annotations

# For processes whose address space is limited. On a machine with many cores OpenBLAS would reserve 40 MiB of it per
# core as it loads, an OpenMP thread takes 8 MiB for its stack, and glibc 64 MiB for the heap of each thread.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}
