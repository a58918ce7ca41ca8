"""Steps of attention over pages, for kernels that go over keys in more than one loop."""

from __future__ import annotations

from common.engine.ops.triton_kernel import kernel, tl


@kernel
def load_keys(  # type: ignore[no-untyped-def]
    plane_ptr, page, position, live, kv_head, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return [positions, BLOCK_D] of a plane, zero where not live."""
    dim = tl.arange(0, BLOCK_D)
    slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
    place = (slot * (KV_HEADS * D) + kv_head * D)[:, None] + dim[None, :]
    return tl.load(plane_ptr + place, mask=live[:, None] & (dim < D)[None, :], other=0.0)


@kernel
def soften(most, total, out, score, value):  # type: ignore[no-untyped-def]
    """Do one step of online softmax (FlashAttention-2, arXiv 2307.08691); a row may see none of the keys."""
    new_most = tl.maximum(most, tl.max(score, axis=1))
    shift = tl.where(new_most == float("-inf"), 0.0, new_most)
    prob = tl.exp2(score - shift[:, None])
    shrink = tl.exp2(most - shift)
    total = total * shrink + tl.sum(prob, axis=1)
    out = out * shrink[:, None]
    out += tl.dot(prob.to(value.dtype), value, input_precision="ieee")
    return new_most, total, out
