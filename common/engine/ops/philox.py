"""Philox4x32-10, the counter-based random generator, in int64 tensor operations: identical on every device.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); Triton's `tl.philox` is the
same.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return four random words per counter; all arguments are int64 tensors of 32-bit words that broadcast.

    A product of two words fits into 64 bits, one of which is the sign bit; the mask after the shift recovers it.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((high >> 32) & MASK) ^ c1 ^ k0
        c2 = ((low >> 32) & MASK) ^ c3 ^ k1
        c1, c3 = high & MASK, low & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def token_words(seed: Tensor, position: Tensor, count: int, first: int = 0) -> Tensor:
    """Return [R, count] int64: the words of the tokens v from `first` on.

    That of row r is from key seed[r] and counter (v, position[r] low, high, 0).

    Args:
        seed: [R] int64.
        position: [R] int64, sequence index of the token to be drawn.
    """
    zero = torch.zeros((1, 1), dtype=torch.int64, device=seed.device)
    token = torch.arange(first, first + count, device=seed.device)[None]
    low, high = position[:, None] & MASK, (position[:, None] >> 32) & MASK
    key = seed[:, None] & MASK, (seed[:, None] >> 32) & MASK
    return philox((token, low, high, zero), key)[0]
