"""The norm of a row in registers, which several kernels end with."""

from __future__ import annotations

from common.engine.ops.triton_kernel import kernel, tl


@kernel
def normed_row(x, weight, size, eps, ROUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return x / rms(x) * weight in the dtype of x, for a row x that is zero past `size`.

    Args:
        weight: float32; ROUNDED is the dtype in which it is stored, to which the normed row is rounded before the
            product (see `rms_norm`).
    """
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    return ((wide * scale).to(ROUNDED).to(tl.float32) * weight).to(x.dtype)


def row_warps(block: int) -> int:
    """Return the warps of a program that keeps a row of `block` numbers in registers."""
    return min(max(block // 512, 1), 16)
