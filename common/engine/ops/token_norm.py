"""RMSNorm of a token's queries and of its keys, over all heads together, in place (OLMo2)."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.rms_norm import rms_norm_reference
from common.engine.ops.row_norm import normed_row, row_warps
from common.engine.ops.triton_kernel import await_previous, chained, kernel, next_power_of_2, tl


def token_norm_reference(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """Normalise the queries qkv[:, :Q] and the keys qkv[:, Q : Q + K] of each token.

    Args:
        qkv: [T, Q + 2 * K], mutated.
        q_weight, k_weight: [Q] and [K].
    """
    first = len(q_weight)
    for weight, part in ((q_weight, qkv[:, :first]), (k_weight, qkv[:, first : first + len(k_weight)])):
        part.copy_(rms_norm_reference(part, weight, eps))


@kernel
def _token_norm_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,  # [T, Q + 2 * K]
    q_weight_ptr,  # [Q]
    k_weight_ptr,  # [K]
    stride,
    queries,  # Q
    keys,  # K
    eps,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (t, 0) has the queries of token t, (t, 1) its keys."""
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    from_queries, from_keys = (1 - part) * queries, part * keys  # one of them is 0
    size = from_queries + from_keys
    column = tl.arange(0, BLOCK)
    live = column < size
    place = qkv_ptr + row * stride + part * queries + column
    x = tl.load(place, mask=live, other=0.0)
    q_weight = tl.load(q_weight_ptr + column, mask=column < from_queries, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + column, mask=column < from_keys, other=0.0).to(tl.float32)
    normed = normed_row(x, q_weight + k_weight, size, eps, q_weight_ptr.dtype.element_ty)
    tl.store(place, normed, mask=live)


def token_norm_triton(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    count, width = qkv.shape
    assert qkv.stride(1) == 1, "the elements of a row must be adjacent"
    assert len(q_weight) + 2 * len(k_weight) == width, (
        f"norms of {len(q_weight)} and {len(k_weight)} for {width}"
    )
    assert q_weight.dtype == k_weight.dtype, "the norms have one dtype"
    assert q_weight.dtype in (qkv.dtype, torch.float32), f"norms of {q_weight.dtype} for {qkv.dtype}"
    assert q_weight.is_contiguous(), "the weight must be contiguous"
    assert k_weight.is_contiguous(), "the weight must be contiguous"
    if count == 0:
        return
    block = next_power_of_2(max(len(q_weight), len(k_weight)))
    _token_norm_kernel[(count, 2)](
        qkv,
        q_weight,
        k_weight,
        qkv.stride(0),
        len(q_weight),
        len(k_weight),
        eps,
        BLOCK=block,
        num_warps=row_warps(block),
        **chained(qkv.device),
    )


def _fake(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    return None


def token_squares_reference(qkv: Tensor, queries: int, keys: int) -> Tensor:
    """Return the sums of squares [T, 2] float32 of each token's queries, its first values, and of the keys after them.

    They are those of this rank.
    """
    squares = qkv[:, : queries + keys].to(torch.float32).square()
    return torch.stack((squares[:, :queries].sum(-1), squares[:, queries:].sum(-1)), dim=-1)


def scale_tokens_reference(
    qkv: Tensor, squares: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, ranks: int
) -> None:
    """Do as `token_norm` on a rank of several, whose heads are a part of those that are normalised together.

    Args:
        qkv: [T, Q + 2 * K] of this rank, mutated.
        squares: [T, 2] float32, sums over all ranks. Keys that several ranks have count once on each of them.
    """
    first = len(q_weight)
    parts = (q_weight, qkv[:, :first]), (k_weight, qkv[:, first : first + len(k_weight)])
    for (weight, part), total in zip(parts, squares.unbind(-1), strict=True):
        scale = torch.rsqrt(total / (ranks * len(weight)) + eps)[:, None]
        part.copy_((weight * (part.float() * scale).to(weight.dtype)).to(part.dtype))


def _fake_squares(qkv: Tensor, queries: int, keys: int) -> Tensor:
    return qkv.new_empty((len(qkv), 2), dtype=torch.float32)


def _fake_scale(
    qkv: Tensor, squares: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, ranks: int
) -> None:
    return None


# These run as several torch kernels on a GPU, too.
token_squares = register_op("token_squares", token_squares_reference, mutates=(), fake=_fake_squares)
scale_tokens = register_op("scale_tokens", scale_tokens_reference, mutates=("qkv",), fake=_fake_scale)
token_norm = register_op(
    "token_norm", token_norm_reference, mutates=("qkv",), fake=_fake, cuda=token_norm_triton
)
