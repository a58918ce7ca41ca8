"""Parts that kernels of attention over pages share: the layout that they expect, reads of keys, and online softmax."""

from __future__ import annotations

from torch import Tensor

from common.engine.ops.triton_kernel import kernel, tl


def check_layout(
    query: Tensor, key_plane: Tensor, value_plane: Tensor, page_table: Tensor, seq_lens: Tensor
) -> None:
    """Assert the layout of query [T, heads, D], planes [num_pages, page_size, kv_heads, D], page lists and lengths."""
    _, heads, head_dim = query.shape
    kv_heads = key_plane.shape[2]
    assert query.stride()[1:] == (head_dim, 1), "heads of a token must be adjacent"
    assert key_plane.is_contiguous(), "planes must be contiguous"
    assert value_plane.is_contiguous(), "planes must be contiguous"
    assert key_plane.shape == value_plane.shape, "planes of different shapes"
    assert key_plane.shape[3] == head_dim, f"head_dim {head_dim} over planes of {key_plane.shape[3]}"
    assert heads % kv_heads == 0, f"{heads} heads over {kv_heads} KV heads"
    assert page_table.stride(1) == 1, "entries of a request must be adjacent"
    assert seq_lens.is_contiguous(), "lengths must be contiguous"


def check_starts(query_start: Tensor, batch: int) -> None:
    """Assert the layout of query_start [batch + 1], the prefix sums of new tokens."""
    assert query_start.shape == (batch + 1,), f"{tuple(query_start.shape)} starts for {batch} requests"
    assert query_start.is_contiguous(), "starts must be contiguous"


def check_extend(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
) -> None:
    """Assert the layout of the arguments of `extend_attention`."""
    check_layout(query, key_plane, value_plane, page_table, seq_lens)
    check_starts(query_start, len(seq_lens))


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
def online_softmax(most, total, out, score, value, SEEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a block of keys to (maxima, sums, outputs) of rows: FlashAttention-2, arXiv 2307.08691.

    `SEEN`: every row sees one of the keys. Else a row may have seen none so far.
    """
    new_most = tl.maximum(most, tl.max(score, axis=1))
    if SEEN:
        shift = new_most
    else:
        shift = tl.where(new_most == float("-inf"), 0.0, new_most)
    prob = tl.exp2(score - shift[:, None])
    shrink = tl.exp2(most - shift)
    total = total * shrink + tl.sum(prob, axis=1)
    out = out * shrink[:, None]
    out += tl.dot(prob.to(value.dtype), value, input_precision="ieee")
    return new_most, total, out
