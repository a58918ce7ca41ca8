"""The experts of one token in three launches: logits, then the choice and the up product, then down and all sums.

Every program chooses the experts itself, from the logits, in which one warp is fast. The last kernel does so before it
waits for the up product, and loads its rows of the weights, which arrive while the up product still runs. No part of a
sum is written: a program has all experts of the token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.engine.ops.expert_choice import choose_experts
from common.engine.ops.expert_products import expert_parts_reference
from common.engine.ops.linear import halves
from common.engine.ops.registration import register_op
from common.engine.ops.route import LOGIT_VECTORS, ChoiceRule, route_reference
from common.engine.ops.silu_mul import activate
from common.engine.ops.sum_parts import sum_parts_reference
from common.engine.ops.triton_kernel import (
    await_results,
    cdiv,
    chained,
    kernel,
    kernel_with_varying,
    launch_next,
    next_power_of_2,
    tl,
)
from common.engine.ops.vector_products import (
    DEPTH,
    VectorTiles,
    load_rows,
    load_vector,
    vector_linear_triton,
)

# As measured on an H200 with the shapes of Qwen3-30B-A3B and Qwen3.5-35B-A3B (tests/bench/NOTES.md).
UP, DOWN = VectorTiles(1, 1), VectorTiles(2, 2)
MAX_INNER = 512  # for 768, of which a power of two is a third idle, separate kernels are as fast


class ExpertChoice(NamedTuple):
    """The logits and the rule by which the kernels choose experts."""

    logits: Tensor  # [T, E] float32; with a gate of the shared experts [T, E + 1]
    rule: ChoiceRule

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of a kernel: logits, correction, slots, numbers."""
        logits, rule = self
        slots = logits if rule.slots is None else rule.slots
        count = 0 if rule.slots is None else len(rule.slots)
        correction = logits if rule.correction is None else rule.correction
        return logits, correction, slots, count, rule.page_size, rule.epsilon, rule.scaling

    def options(self) -> dict[str, Any]:
        """Return the constants of a kernel."""
        width = self.logits.shape[1]
        return {"LOGITS": width, **self.rule.options(width - self.rule.shared_gate)}


@kernel
def _chosen(  # type: ignore[no-untyped-def]
    token,
    logits_ptr,
    correction_ptr,
    epsilon,
    scaling,
    LOGITS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHOSEN: tl.constexpr,
    CORRECTED: tl.constexpr,
    GATED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Return the experts [BLOCK_C] of a token and their shares. The logits are read past the first cache, since a
    program that does not wait may find values of an earlier launch there.
    """
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_M)
    real = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    place = logits_ptr + token * LOGITS + group[:, None] * MEMBERS + member[None, :]
    logits = tl.load(place, mask=real, other=0.0, cache_modifier=".cg")
    gate = 1.0
    if GATED:
        logit = tl.load(logits_ptr + token * LOGITS + GROUPS * MEMBERS, cache_modifier=".cg")
        gate = 1.0 / (1.0 + tl.exp(-logit))
    experts, shares = choose_experts(
        logits, gate, correction_ptr, epsilon, scaling,
        GROUPS, KEPT, MEMBERS, CHOSEN, CORRECTED, SIGMOID, NORMALISED, BLOCK_G, BLOCK_M, BLOCK_C,
    )  # fmt: skip
    return experts, shares


@kernel_with_varying("num_slots")
def _up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, DEPTH]
    weight_ptr,  # [experts * 2 * size, DEPTH], gates first
    out_ptr,  # [T * pairs, size]
    logits_ptr,
    correction_ptr,
    slots_ptr,
    num_slots,
    page_size,
    epsilon,
    scaling,
    size,
    DEPTH: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least DEPTH
    COLUMNS: tl.constexpr,
    CHAINED: tl.constexpr,
    LOGITS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SHARED: tl.constexpr,
    CORRECTED: tl.constexpr,
    SLOTS: tl.constexpr,
    GATED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Each program computes COLUMNS columns of one pair."""
    await_results(CHAINED)
    # Only now: the next kernel reads the logits before it waits.
    launch_next(CHAINED)
    pair = tl.program_id(1)
    token, rank = pair // (CHOSEN + SHARED), pair % (CHOSEN + SHARED)
    slot = page_size
    if SLOTS:
        slot = tl.load(slots_ptr + token, mask=token < num_slots, other=0)
    experts, _ = _chosen(
        token, logits_ptr, correction_ptr, epsilon, scaling,
        LOGITS, GROUPS, KEPT, MEMBERS, CHOSEN, CORRECTED, GATED, SIGMOID, NORMALISED, BLOCK_G, BLOCK_M, BLOCK_C,
    )  # fmt: skip
    expert = tl.sum(tl.where(tl.arange(0, BLOCK_C) == rank, experts, 0), axis=0)
    if slot >= page_size:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        real = column < size
        dtype = out_ptr.dtype.element_ty
        gates = load_rows(weight_ptr, expert * 2 * size + column, real, DEPTH, BLOCK_K)
        ups = load_rows(weight_ptr, (expert * 2 + 1) * size + column, real, DEPTH, BLOCK_K)
        x = load_vector(x_ptr + token * DEPTH, DEPTH, BLOCK_K)
        # Rounded where two separate kernels would round.
        gate = tl.sum(gates.to(tl.float32) * x, axis=1).to(dtype).to(tl.float32)
        up = tl.sum(ups.to(tl.float32) * x, axis=1).to(dtype).to(tl.float32)
        tl.store(out_ptr + pair * size + column, (activate(gate, False) * up).to(dtype), mask=real)


@kernel_with_varying("num_slots")
def _down_kernel(  # type: ignore[no-untyped-def]
    inner_ptr,  # [T * pairs, DEPTH]
    weight_ptr,  # [experts * size, DEPTH]
    residual_ptr,  # [T, size]
    out_ptr,  # [T, size]
    residual_stride,
    logits_ptr,
    correction_ptr,
    slots_ptr,
    num_slots,
    page_size,
    epsilon,
    scaling,
    size,
    DEPTH: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least DEPTH
    COLUMNS: tl.constexpr,
    CHAINED: tl.constexpr,
    LOGITS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SHARED: tl.constexpr,
    CORRECTED: tl.constexpr,
    SLOTS: tl.constexpr,
    GATED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Each program computes COLUMNS columns of one token; it is launched by `_up_kernel`, after that has waited."""
    launch_next(CHAINED)
    token = tl.program_id(1)
    slot = page_size
    if SLOTS:
        slot = tl.load(slots_ptr + token, mask=token < num_slots, other=0)
    experts, shares = _chosen(
        token, logits_ptr, correction_ptr, epsilon, scaling,
        LOGITS, GROUPS, KEPT, MEMBERS, CHOSEN, CORRECTED, GATED, SIGMOID, NORMALISED, BLOCK_G, BLOCK_M, BLOCK_C,
    )  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rank, depth = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    real = column < size
    pairs = tl.where(slot >= page_size, CHOSEN + SHARED, 0)
    reads = (rank < pairs)[:, None, None] & (depth < DEPTH)[None, None, :]
    rows = experts[:, None] * size + column[None, :]
    place = weight_ptr + rows.to(tl.int64)[:, :, None] * DEPTH + depth[None, None, :]
    tile = tl.load(place, mask=reads & real[None, :, None], other=0.0)
    await_results(CHAINED)
    dtype = out_ptr.dtype.element_ty
    source = (token * (CHOSEN + SHARED) + rank)[:, None, None] * DEPTH + depth[None, None, :]
    inner = tl.load(inner_ptr + source, mask=reads, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + token * residual_stride + column, mask=real, other=0.0)
    # Rounded where separate kernels would round.
    parts = tl.sum(tile.to(tl.float32) * inner, axis=2).to(dtype).to(tl.float32) * shares[:, None]
    parts = tl.where((rank < pairs)[:, None], parts.to(dtype).to(tl.float32), 0.0)
    total = tl.sum(parts, axis=0).to(dtype).to(tl.float32) + residual.to(tl.float32)
    tl.store(out_ptr + token * size + column, total.to(dtype), mask=real)


def few_experts_triton(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    residual: Tensor,
    choice: ExpertChoice,
) -> Tensor:
    """Return residual + the sum of share * down(silu(gate(x)) * up(x)) over the experts of each token [T, H].

    Args:
        x: [T, H].
        gate_up: [E, 2 * I, H], gates first.
        down: [E, H, I].
        residual: [T, H].
    """
    tokens, hidden = x.shape
    _, wide, depth = gate_up.shape
    size = wide // 2
    assert x.is_contiguous() and depth == hidden, f"x is {tuple(x.shape)}, the experts take {depth}"  # noqa: PT018
    assert gate_up.is_contiguous() and down.is_contiguous(), "the stacks must be contiguous"  # noqa: PT018
    assert down.shape[1:] == (hidden, size), f"down {tuple(down.shape)} for an inner size of {size}"
    assert x.dtype == gate_up.dtype == down.dtype == residual.dtype, "weights and rows of one dtype"
    assert residual.shape == x.shape and residual.stride(1) == 1, "one residual per row"  # noqa: PT018
    assert choice.logits.is_contiguous() and len(choice.logits) == tokens, "the logits of each row"  # noqa: PT018
    inner, out = x.new_empty((tokens * choice.rule.pairs, size)), x.new_empty((tokens, hidden))
    if tokens == 0:
        return out
    common = choice.options() | chained(x.device)
    _up_kernel[(cdiv(size, UP.columns), len(inner))](
        *(x, gate_up, inner),
        *choice.arguments(),
        size,
        DEPTH=hidden,
        BLOCK_K=next_power_of_2(hidden),
        COLUMNS=UP.columns,
        num_warps=UP.warps,
        **common,
    )
    _down_kernel[(cdiv(hidden, DOWN.columns), tokens)](
        *(inner, down, residual, out, residual.stride(0)),
        *choice.arguments(),
        hidden,
        DEPTH=size,
        BLOCK_K=next_power_of_2(size),
        COLUMNS=DOWN.columns,
        num_warps=DOWN.warps,
        **common,
    )
    return out


def fuses_experts(stream: Tensor, gate_up: Tensor) -> bool:
    """Return whether `add_experts` is faster than its steps for stream [T, H] and gate_up [E, 2 * I, H]."""
    _, wide, hidden = gate_up.shape
    one = stream.is_cuda and len(stream) == 1 and halves(stream, gate_up)
    return one and hidden <= DEPTH and wide // 2 <= MAX_INNER


def add_experts_reference(
    x: Tensor,
    stream: Tensor,
    gate_up: Tensor,
    down: Tensor,
    rows: Tensor,
    correction: Tensor | None,
    slots: Tensor | None,
    page_size: int,
    chosen: int,
    shared: int,
    shared_gate: bool,
    sigmoid: bool,
    groups: int,
    kept_groups: int,
    normalised: bool,
    epsilon: float,
    scaling: float,
) -> Tensor:
    """Return stream + the sum of the outputs of the experts that a router chooses for x [T, H].

    See `route` for the arguments from `rows` on, and `expert_parts` for the stacks.
    """
    rule = sigmoid, groups, kept_groups, normalised, epsilon, scaling
    chosen_by = rows, correction, slots, page_size, chosen, shared, shared_gate
    experts, shares = route_reference(x, *chosen_by, *rule)
    return sum_parts_reference(expert_parts_reference(x, gate_up, down, experts, shares), experts) + stream


def add_experts_triton(
    x: Tensor, stream: Tensor, gate_up: Tensor, down: Tensor, rows: Tensor, *given: Any
) -> Tensor:
    """Launch the kernels; `given` is a `ChoiceRule`."""
    logits = vector_linear_triton(x, rows, None, LOGIT_VECTORS, torch.float32)
    return few_experts_triton(x, gate_up, down, stream, ExpertChoice(logits, ChoiceRule(*given)))


def _fake(x: Tensor, stream: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(stream, memory_format=torch.contiguous_format)


add_experts = register_op(
    "add_experts",
    add_experts_reference,
    mutates=(),
    fake=_fake,
    cuda=add_experts_triton,
    inlined=False,
)
