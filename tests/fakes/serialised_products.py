"""Finds what makes the matrix units of an H200 wait, or registers spill, in a compiled kernel.

With more than one accumulator in a loop, or one that is written between two steps, the assembler serialises the
products of matrix units and tells so in a remark: each step then waits for the previous one.
"""

from __future__ import annotations

import re
import subprocess
import tempfile

import triton

REMARK = re.compile(r"C75\d\d")
SPILL = re.compile(r"[1-9]\d* bytes spill")


def serialised_products(ptx: str) -> list[str]:
    """Return the assembler's remarks about products that it serialises, and about registers that it spills."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", source.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return remarks(done.stderr + done.stdout)


def remarks(output: str) -> list[str]:
    """Return the lines of the assembler's output that `serialised_products` looks for."""
    return [line for line in output.splitlines() if REMARK.search(line) or SPILL.search(line)]
