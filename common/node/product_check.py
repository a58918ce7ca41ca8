"""Refuses a GPU on which torch's library multiplies wrongly.

An MPS server can limit a process to some of the GPU's multiprocessors. Many products of cuBLAS (CUDA 13.0, H200) were
then wrong without any error, with 40 to 85 % of them (tests/bench/NOTES.md, "Two nodes on one GPU"). No variable has to
show such a limit, since it may be the server's default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError

# Products of the 8B shape of which some were wrong with every limit that was tried. They take half a GiB.
WEIGHTS = ((4096, 14336), (4096, 4096))
ROWS = (256, 512, 1024, 2048, 4096)
COMPARED = 16  # rows of each product
TOLERANCE = 0.25  # of values with a standard deviation of 1; bf16 rounds those of 4 by 0.016


def wrong_product(
    multiply: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
    weights: Sequence[tuple[int, int]] = WEIGHTS,
    rows: Sequence[int] = ROWS,
    dtype: torch.dtype = torch.bfloat16,
) -> str | None:
    """Return which of some products of random numbers is wrong and by how much; None if all are right.

    Args:
        multiply: returns x W^T for x [rows, depth] and W [size, depth].
        weights: (size, depth) of each W.
    """
    generator = torch.Generator(device).manual_seed(1)
    for size, depth in weights:
        weight = torch.randn(size, depth, dtype=dtype, device=device, generator=generator) * depth**-0.5
        x = torch.randn(max(rows), depth, dtype=dtype, device=device, generator=generator)
        for count in rows:
            found = multiply(x[:count], weight).float()
            if not bool(found.isfinite().all()):
                return f"the product of {count} rows by [{size}, {depth}] has values that are not finite"
            error = 0.0
            for row in range(0, count, max(count // COMPARED, 1)):
                # Elementwise, so that no other product of the library decides.
                expected = (weight * x[row]).sum(1, dtype=torch.float32)
                error = max(error, float((found[row] - expected).abs().max()))
            if error > TOLERANCE:
                return f"the product of {count} rows by [{size}, {depth}] is wrong by {error:.2g}"
    return None


@functools.cache
def check_products(device: torch.device) -> None:
    """Raise ConfigError if the GPU's products are wrong; takes a tenth of a second, once per process."""
    wrong = wrong_product(F.linear, device)
    torch.cuda.empty_cache()
    if wrong is not None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        raise ConfigError(
            "device",
            f"{str(device)!r}: {wrong}, where values are about 1. MPS gives this process {processors} multiprocessors, "
            "and torch's library (cuBLAS) multiplies wrongly with only some of them: set "
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE and the default of the MPS server to 100",
        )
