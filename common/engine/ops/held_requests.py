"""Copies the page table and lengths of a prompt batch to static memory in one launch; torch would take five."""

from __future__ import annotations

from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import cdiv, kernel_with_varying, next_power_of_2, tl

BLOCK = 256  # pages per program, whatever the width: another block would be compiled while serving


def hold_requests_reference(
    pages: Tensor, starts: Tensor, lens: Tensor, held_pages: Tensor, held_starts: Tensor, held_lens: Tensor
) -> None:
    """Copy B requests to memory for N >= B of them. Those past the live ones have no tokens.

    Args:
        pages: [B, W] int32; `held_pages` [N, W'] int32 with W' >= W keeps what it has beyond.
        starts: [B + 1] int32, prefix sums of new tokens; `held_starts` [N + 1].
        lens: [B] int32; `held_lens` [N].
    """
    count, width = pages.shape
    held_pages[:count, :width].copy_(pages)
    held_starts[: count + 1].copy_(starts)
    held_starts[count + 1 :] = starts[-1]
    held_lens[:count].copy_(lens)
    held_lens[count:].zero_()


@kernel_with_varying("width", "count")
def _hold_requests_kernel(  # type: ignore[no-untyped-def]
    pages_ptr,  # [count, width]
    starts_ptr,  # [count + 1]
    lens_ptr,  # [count]
    held_pages_ptr,  # [held, row_stride]
    held_starts_ptr,  # [held + 1]
    held_lens_ptr,  # [held]
    count,
    width,
    held,
    row_stride,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages_ptr + request * width + entry, mask=entry < width, other=0)
    tl.store(held_pages_ptr + request * row_stride + entry, page, mask=entry < width)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        index = tl.arange(0, REQUESTS)
        start = tl.load(starts_ptr + tl.minimum(index, count))
        tl.store(held_starts_ptr + index, start, mask=index <= held)
        length = tl.load(lens_ptr + index, mask=index < count, other=0)
        tl.store(held_lens_ptr + index, length, mask=index < held)


def hold_requests_triton(
    pages: Tensor, starts: Tensor, lens: Tensor, held_pages: Tensor, held_starts: Tensor, held_lens: Tensor
) -> None:
    (count, width), held = pages.shape, len(held_lens)
    assert count <= held, "there is room for every request"
    assert width <= held_pages.shape[1], "there is room for every page"
    for each in (pages, starts, lens, held_pages, held_starts, held_lens):
        assert each.is_contiguous(), "page tables and lengths must be contiguous"
    _hold_requests_kernel[(max(count, 1), max(cdiv(width, BLOCK), 1))](
        pages,
        starts,
        lens,
        held_pages,
        held_starts,
        held_lens,
        count,
        width if count else 0,
        held,
        held_pages.stride(0),
        BLOCK=BLOCK,
        REQUESTS=next_power_of_2(held + 1),
        num_warps=4,
    )


def _nothing(
    pages: Tensor, starts: Tensor, lens: Tensor, held_pages: Tensor, held_starts: Tensor, held_lens: Tensor
) -> None:
    return None


hold_requests = register_op(
    "hold_requests",
    hold_requests_reference,
    mutates=("held_pages", "held_starts", "held_lens"),
    fake=_nothing,
    cuda=hold_requests_triton,
)
