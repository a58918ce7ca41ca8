"""Writes how far a forward has come to memory that the host reads while the forward runs.

The value is a count that each call raises by one, so a captured graph writes it without knowing which step it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import await_previous, chained, kernel, tl


def write_mark_reference(count: Tensor, seen: Tensor) -> None:
    """Raise `count` by one and write it to `seen`.

    Args:
        count: [1] int64 on the device of the forward, mutated.
        seen: [1] int64 in host memory, pinned if the device is a GPU; mutated.
    """
    count.add_(1)
    seen.copy_(count)


@kernel
def _write_mark_kernel(count_ptr, seen_ptr, CHAINED: tl.constexpr):  # type: ignore[no-untyped-def]
    await_previous(CHAINED)
    count = tl.load(count_ptr) + 1
    tl.store(count_ptr, count)
    tl.store(seen_ptr, count)


def write_mark_triton(count: Tensor, seen: Tensor) -> None:
    assert count.shape == seen.shape == (1,), "one count"
    assert count.dtype == seen.dtype == torch.int64, "counts are int64"
    _write_mark_kernel[(1,)](count, seen, num_warps=1, **chained(count.device))


def _fake(count: Tensor, seen: Tensor) -> None:
    return None


write_mark = register_op(
    "write_mark", write_mark_reference, mutates=("count", "seen"), fake=_fake, cuda=write_mark_triton
)
