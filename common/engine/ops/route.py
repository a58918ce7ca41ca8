"""The choice of experts for each token, and their shares: see `RouterRule` in common/checkpoint/experts_config.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.expert_choice import choose_experts
from common.engine.ops.linear import halves, linear_parts
from common.engine.ops.registration import register_op
from common.engine.ops.tiles import FEW, MAX_ROWS, Tiles
from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel_with_varying,
    next_power_of_2,
    tl,
)
from common.engine.ops.vector_products import VectorTiles, choose_vectors, vector_linear_triton

LOGIT_VECTORS = VectorTiles(1, 4)  # for the logits of one row
# Tiles of the logits of few rows: many small programs, since a router is small (512 KiB in Qwen3-30B-A3B).
LOGIT_COLUMNS, LOGIT_DEPTH, LOGIT_PARTS = 16, 128, 16


class ChoiceRule(NamedTuple):
    """The arguments of `route` that follow the router's rows, see `route_reference`."""

    correction: Tensor | None
    slots: Tensor | None
    page_size: int
    chosen: int
    shared: int
    shared_gate: bool
    sigmoid: bool
    groups: int
    kept_groups: int
    normalised: bool
    epsilon: float
    scaling: float

    @property
    def pairs(self) -> int:
        """Number of experts of a token."""
        return self.chosen + self.shared

    def options(self, size: int) -> dict[str, Any]:
        """Return the constants of a kernel that chooses among `size` experts."""
        members = size // self.groups
        return {
            "GROUPS": self.groups,
            "KEPT": self.kept_groups,
            "MEMBERS": members,
            "CHOSEN": self.chosen,
            "SHARED": self.shared,
            "CORRECTED": self.correction is not None,
            "SLOTS": self.slots is not None,
            "GATED": self.shared_gate,
            "SIGMOID": self.sigmoid,
            "NORMALISED": self.normalised,
            "BLOCK_G": next_power_of_2(self.groups),
            "BLOCK_M": next_power_of_2(members),
            "BLOCK_C": next_power_of_2(self.pairs),
        }


def route_reference(
    x: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """Return (experts [T, K] int32, shares [T, K] float32) for x [T, H], K = chosen + shared.

    Args:
        rows: [E, H]; with `shared_gate` [E + 1, H], whose last row gives the logit of the share of shared experts.
        correction: [E] float32, added to the scores for the choice.
        slots: KV slots of the rows. Rows in page 0 and rows without a slot are padding: their experts are -1.
        shared: number of shared experts, E .. E + shared - 1, which every token has.
    """
    logits = F.linear(x.float(), rows.float())  # [T, E]
    gate = logits[:, -1:].sigmoid() if shared_gate else torch.ones_like(logits[:, :1])
    logits = logits[:, : logits.shape[1] - shared_gate]
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    ranked = scores if correction is None else scores + correction
    if groups > 1:
        by_group = ranked.view(-1, groups, logits.shape[1] // groups)  # [T, groups, E / groups]
        worth = by_group.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(worth).scatter(1, worth.topk(kept_groups).indices, 1.0)
        ranked = by_group.masked_fill(kept[:, :, None] == 0, -torch.inf).flatten(1)
    experts = ranked.topk(chosen).indices
    shares = scores.gather(1, experts)
    if normalised:
        shares = shares / (shares.sum(-1, keepdim=True) + epsilon)
    always = torch.arange(shared, device=x.device) + logits.shape[1]
    experts = torch.cat([experts, always.expand(x.shape[0], -1)], dim=1)
    shares = torch.cat([shares * scaling, gate.expand(-1, shared)], dim=1)
    if slots is not None:
        padding = F.pad(slots, (0, x.shape[0] - slots.shape[0])) < page_size
        experts = experts.masked_fill(padding[:, None], -1)
    return experts.to(torch.int32), shares


@kernel_with_varying("part_stride", "num_slots")
def _route_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [PARTS, rows, GROUPS * MEMBERS] float32, to be added up
    x_ptr,  # [rows, DEPTH]; read if GATED
    gate_ptr,  # [DEPTH]; read if GATED
    correction_ptr,  # [EXPERTS] float32; read if CORRECTED
    slots_ptr,  # [num_slots] int64; read if SLOTS
    experts_ptr,  # [rows, CHOSEN + SHARED] int32
    shares_ptr,  # [rows, CHOSEN + SHARED] float32
    x_stride,
    part_stride,
    num_slots,
    page_size,
    epsilon,
    scaling,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    MEMBERS: tl.constexpr,  # experts of a group
    CHOSEN: tl.constexpr,
    SHARED: tl.constexpr,
    CORRECTED: tl.constexpr,
    SLOTS: tl.constexpr,
    GATED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK_G: tl.constexpr,  # at least GROUPS
    BLOCK_M: tl.constexpr,  # at least MEMBERS
    BLOCK_C: tl.constexpr,  # at least CHOSEN + SHARED
    DEPTH: tl.constexpr,
    BLOCK_D: tl.constexpr,  # at least DEPTH
    CHAINED: tl.constexpr,
):
    """One program per row."""
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_M)
    expert = group[:, None] * MEMBERS + member[None, :]
    real = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    logits = tl.zeros((BLOCK_G, BLOCK_M), tl.float32)
    for part in tl.static_range(PARTS):
        source = part * part_stride + row * (GROUPS * MEMBERS) + expert
        logits += tl.load(logits_ptr + source, mask=real, other=0.0)
    slot = page_size
    if SLOTS:
        slot = tl.load(slots_ptr + row, mask=row < num_slots, other=0)
    gate = 1.0
    if GATED:
        dim = tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + row * x_stride + dim, mask=dim < DEPTH, other=0.0).to(tl.float32)
        weight = tl.load(gate_ptr + dim, mask=dim < DEPTH, other=0.0).to(tl.float32)
        gate = 1.0 / (1.0 + tl.exp(-tl.sum(x * weight, axis=0)))
    experts, shares = choose_experts(
        logits, gate, correction_ptr, epsilon, scaling,
        GROUPS, KEPT, MEMBERS, CHOSEN, CORRECTED, SIGMOID, NORMALISED, BLOCK_G, BLOCK_M, BLOCK_C,
    )  # fmt: skip
    rank = tl.arange(0, BLOCK_C)
    experts = tl.where(slot < page_size, -1, experts)
    place = row * (CHOSEN + SHARED) + rank
    tl.store(experts_ptr + place, experts, mask=rank < CHOSEN + SHARED)
    tl.store(shares_ptr + place, shares, mask=rank < CHOSEN + SHARED)


def _logits(x: Tensor, rows: Tensor) -> Tensor:
    """Return the logits in parts [parts, T, E] float32, unrounded."""
    count, depth = x.shape
    if halves(x, rows) and choose_vectors(count, *rows.shape) is not None:
        return vector_linear_triton(x, rows, None, LOGIT_VECTORS, torch.float32)[None]
    if halves(x, rows) and count <= MAX_ROWS:
        steps = cdiv(depth, LOGIT_DEPTH)
        parts = cdiv(steps, cdiv(steps, LOGIT_PARTS))
        tile_rows = max(FEW, next_power_of_2(count))
        return linear_parts(
            x, rows, None, Tiles(LOGIT_COLUMNS, LOGIT_DEPTH, 4, 2, rows=tile_rows, parts=parts)
        )
    if x.dtype == torch.float32 or not x.is_cuda:
        return F.linear(x.float(), rows.float())[None]
    return torch.mm(x, rows.t(), out_dtype=torch.float32)[None]


def route_triton(x: Tensor, rows: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """Launch the kernels. For a row with NaN only the range of the experts is defined; no two are equal.

    Args:
        given: the fields of a `ChoiceRule`.
    """
    rule = ChoiceRule(*given)
    correction, slots = rule.correction, rule.slots
    count, size = x.shape[0], rows.shape[0] - rule.shared_gate
    assert size % rule.groups == 0, f"{size} experts in {rule.groups} groups"
    assert rule.chosen <= size // rule.groups * rule.kept_groups, f"{rule.chosen} of {size} experts"
    assert correction is None or (correction.shape == (size,) and correction.dtype == torch.float32), (
        "one float32 correction per expert"
    )
    assert x.stride(1) == 1 and rows.is_contiguous(), "the elements of a row must be adjacent"  # noqa: PT018
    assert slots is None or (slots.is_contiguous() and len(slots) <= count), "one slot per row"
    experts, shares = _fake(x, rows, *given)
    if count == 0:
        return experts, shares
    # Without the gate: the library multiplies an odd number of rows slowly.
    logits = _logits(x, rows[:size])
    _route_kernel[(count,)](
        logits,
        x,
        rows[-1],
        logits if correction is None else correction,
        experts if slots is None else slots,
        experts,
        shares,
        x.stride(0),
        logits.stride(0),
        0 if slots is None else len(slots),
        rule.page_size,
        rule.epsilon,
        rule.scaling,
        PARTS=logits.shape[0],
        DEPTH=x.shape[1],
        BLOCK_D=next_power_of_2(x.shape[1]),
        num_warps=1 if size <= 256 else 4,
        **rule.options(size),
        **chained(x.device),
    )
    return experts, shares


def _fake(x: Tensor, rows: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    shape = x.shape[0], ChoiceRule(*given).pairs
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)


route = register_op("route", route_reference, mutates=(), fake=_fake, cuda=route_triton)
