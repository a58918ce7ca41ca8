"""The choice of a token's experts from its logits, which several kernels contain: see `route`."""

from __future__ import annotations

from common.engine.ops.triton_kernel import kernel, tl


@kernel
def choose_experts(  # type: ignore[no-untyped-def]
    logits,  # [BLOCK_G, BLOCK_M] float32, undefined past the groups and their members
    gate,  # share of the shared experts
    correction_ptr,  # [GROUPS * MEMBERS] float32; read if CORRECTED
    epsilon,
    scaling,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    MEMBERS: tl.constexpr,  # experts of a group
    CHOSEN: tl.constexpr,
    CORRECTED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK_G: tl.constexpr,  # at least GROUPS
    BLOCK_M: tl.constexpr,  # at least MEMBERS
    BLOCK_C: tl.constexpr,  # at least CHOSEN and the shared experts
):
    """Return the experts [BLOCK_C] int32 and their shares [BLOCK_C] float32; the shared experts follow the chosen."""
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_M)
    expert = group[:, None] * MEMBERS + member[None, :]
    real = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        most = tl.max(tl.max(tl.where(real, logits, float("-inf")), axis=1), axis=0)
        powers = tl.where(real, tl.exp(logits - most), 0.0)
        scores = powers / tl.sum(tl.sum(powers, axis=1), axis=0)
    left = scores
    if CORRECTED:
        left += tl.load(correction_ptr + expert, mask=real, other=0.0)
    # The experts of a row differ even if scores are NaN or a correction is -inf: a taken expert is -inf.
    left = tl.where(left >= -1.0e38, left, -1.0e38)
    left = tl.where(real, left, float("-inf"))
    if GROUPS > 1:
        best = tl.max(left, axis=1)
        at = tl.min(tl.where(left == best[:, None], member[None, :], BLOCK_M), axis=1)
        worth = best + tl.max(tl.where(member[None, :] == at[:, None], float("-inf"), left), axis=1)
        ahead = (worth[None, :] > worth[:, None]) | (
            (worth[None, :] == worth[:, None]) & (group[None, :] < group[:, None])
        )
        kept = tl.sum(ahead.to(tl.int32), axis=1) < KEPT
        left = tl.where(kept[:, None], left, float("-inf"))
    # Scores as integers of the same order, which a warp compares in one instruction.
    number: tl.constexpr = BLOCK_G * BLOCK_M
    index = tl.arange(0, number)
    bits = tl.reshape(left, (number,)).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    if CORRECTED:
        scores = tl.reshape(scores, (number,))
    rank = tl.arange(0, BLOCK_C)
    at = tl.zeros((BLOCK_C,), tl.int32)
    found = tl.zeros((BLOCK_C,), tl.int32)
    shares = tl.zeros((BLOCK_C,), tl.float32)
    for nth in tl.static_range(CHOSEN):
        best = tl.max(bits, axis=0)
        place = tl.min(tl.where(bits == best, index, number), axis=0)
        at = tl.where(rank == nth, place, at)
        found = tl.where(rank == nth, best, found)
        if CORRECTED:
            shares = tl.where(rank == nth, tl.sum(tl.where(index == place, scores, 0.0), axis=0), shares)
        bits = tl.where(index == place, -0x80000000, bits)
    if not CORRECTED:
        shares = tl.where(found < 0, found ^ 0x7FFFFFFF, found).to(tl.float32, bitcast=True)
        shares = tl.where(shares < 0.0, float("nan"), shares)  # a row with NaN has NaN shares
        shares = tl.where(rank < CHOSEN, shares, 0.0)
    if NORMALISED:
        shares = shares / (tl.sum(shares, axis=0) + epsilon)
    shares = tl.where(rank < CHOSEN, shares * scaling, gate)
    experts = tl.where(
        rank < CHOSEN, at // BLOCK_M * MEMBERS + at % BLOCK_M, GROUPS * MEMBERS + rank - CHOSEN
    )
    return experts, shares
