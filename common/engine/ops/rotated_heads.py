"""The norm and the rotation of heads in registers, for kernels that read queries and keys as a product left them."""

from __future__ import annotations

from common.engine.ops.triton_kernel import kernel, tl


@kernel
def rotated_heads(  # type: ignore[no-untyped-def]
    heads,  # [ROWS] pointers
    exists,  # [ROWS] bool
    cos,  # pointer to [2 * TURNED], of the token
    sin,
    weight_ptr,  # [D]; read if NORM
    eps,
    D: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
):
    """Return heads [ROWS, BLOCK_D], rounded as `rotary_kv_write` rounds them; zero past D."""
    dim = tl.arange(0, BLOCK_D)
    partner = tl.where(dim < TURNED, dim + TURNED, tl.where(dim < 2 * TURNED, dim - TURNED, dim))
    read = exists[:, None] & (dim < D)[None, :]
    raw = tl.load(heads[:, None] + dim[None, :], mask=read, other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(heads[:, None] + partner[None, :], mask=read, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        rounded = weight_ptr.dtype.element_ty
        weight = tl.load(weight_ptr + dim, mask=dim < D, other=0.0).to(tl.float32)[None, :]
        other = tl.load(weight_ptr + partner, mask=dim < D, other=0.0).to(tl.float32)[None, :]
        x = ((x * scale).to(rounded).to(tl.float32) * weight).to(raw.dtype).to(tl.float32)
        y = ((y * scale).to(rounded).to(tl.float32) * other).to(raw.dtype).to(tl.float32)
    turns = dim < 2 * TURNED
    angle = tl.load(cos + dim, mask=turns, other=1.0).to(tl.float32)[None, :]
    # Negated in the first half.
    across = tl.load(sin + dim, mask=turns, other=0.0).to(tl.float32)[None, :]
    return (x * angle + y * across).to(raw.dtype)
