"""Token masks: the kernel against its reference, and the place of masks among the other sampling parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.ops.mask_logits import mask_logits_cpu, mask_logits_reference, mask_logits_triton
from common.engine.ops.triton_kernel import tl
from common.engine.sampling.logit_masks import LogitMasks
from common.engine.sampling.sampler import sample
from tests.unit.engine.test_sampler import make

INTERPRETED = pytest.mark.skipif(
    tl is None or torch.cuda.is_available(), reason="compiled kernels: tests/gpu"
)


def words_of(allowed: Tensor) -> Tensor:
    """Pack bool [M, V] into int32 [M, ceil(V / 32)]."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32))
    bits = padded.view(len(allowed), -1, 32).to(torch.int64) << torch.arange(32)
    return bits.sum(-1).to(torch.uint32).view(torch.int32)


def case(vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [6, V], masks [3, V] and owners [6]."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator)
    logits[4, 1] = torch.nan
    allowed = torch.rand(3, vocab, generator=generator) < 0.3
    return logits, allowed, torch.tensor([2, -1, 0, 0, 1, -1])


def expected(logits: Tensor, allowed: Tensor, owner: Tensor) -> Tensor:
    """Apply the definition, token by token."""
    out = logits.clone()
    for row, mask in enumerate(owner.tolist()):
        for token in range(logits.shape[1]) if mask >= 0 else ():
            if not allowed[mask, token] and not out[row, token].isnan():
                out[row, token] = -torch.inf
    return out


@pytest.mark.parametrize("vocab", [3, 32, 50, 64])
def test_the_reference_follows_the_definition(vocab: int) -> None:
    logits, allowed, owner = case(vocab)
    wanted = expected(logits, allowed, owner)
    mask_logits_reference(logits, words_of(allowed), owner)
    assert torch.equal(logits.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert logits[4, 1].isnan()


@pytest.mark.parametrize("vocab", [3, 50, 4096, 9001])
def test_the_code_for_cpus_equals_the_reference(vocab: int) -> None:
    logits, allowed, owner = case(vocab)
    wide = torch.zeros(6, vocab + 5)
    wide[:, :vocab] = logits
    mask_logits_reference(logits, words_of(allowed), owner)
    mask_logits_cpu(wide[:, :vocab], words_of(allowed), owner)
    assert torch.equal(wide[:, :vocab].nan_to_num(7.0), logits.nan_to_num(7.0))
    assert not wide[:, vocab:].any(), "nothing past the row is written"


@INTERPRETED
@pytest.mark.parametrize("vocab", [50, 4096, 9001])
def test_the_kernel_equals_the_reference(vocab: int) -> None:
    logits, allowed, owner = case(vocab)
    wide = torch.zeros(6, vocab + 5)
    wide[:, :vocab] = logits
    mask_logits_reference(logits, words_of(allowed), owner)
    mask_logits_triton(wide[:, :vocab], words_of(allowed), owner)
    assert torch.equal(wide[:, :vocab].nan_to_num(7.0), logits.nan_to_num(7.0))
    assert not wide[:, vocab:].any(), "nothing past the row is written"


def test_filters_apply_to_what_the_mask_leaves_and_logprobs_stay_raw() -> None:
    """Top-k 2 keeps two allowed tokens, although likelier ones exist outside the mask."""
    logits = torch.arange(40.0).repeat(400, 1) / 4
    allowed = torch.zeros(1, 40, dtype=torch.bool)
    allowed[0, [3, 5, 6]] = True
    owner = torch.zeros(400, dtype=torch.int64)
    owner[200:] = -1
    raw = logits.log_softmax(-1)
    batch = make(400, top_k=2, seed=torch.arange(400), num_logprobs=1)
    batch.masks = LogitMasks(words_of(allowed), owner)
    out = sample(logits, batch)
    assert set(out.token_ids[:200].tolist()) == {5, 6}
    assert set(out.token_ids[200:].tolist()) == {38, 39}
    assert out.logprobs is not None
    assert torch.equal(out.logprobs, raw.gather(1, out.token_ids[:, None])[:, 0])
    assert out.top_ids is not None
    assert (out.top_ids == 39).all()


def test_a_mask_changes_no_other_draw() -> None:
    """Rows without a mask draw the same tokens, and a masked row what it draws if its first choice is allowed."""
    logits = torch.randn(64, 40)
    plain = sample(logits.clone(), make(64, seed=torch.arange(64))).token_ids
    allowed = torch.ones(64, 40, dtype=torch.bool)
    allowed[torch.arange(64), (plain + 1) % 40] = False
    owner = torch.arange(64)
    owner[::3] = -1
    batch = make(64, seed=torch.arange(64))
    batch.masks = LogitMasks(words_of(allowed), owner)
    assert torch.equal(sample(logits, batch).token_ids, plain)


@pytest.mark.parametrize("all_greedy", [True, False])
def test_a_row_without_any_allowed_token_is_invalid(all_greedy: bool) -> None:
    batch = make(2, temperature=0.0 if all_greedy else 1.0, all_greedy=all_greedy, any_filter=False)
    batch.masks = LogitMasks(torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0, -1]))
    assert sample(torch.randn(2, 40), batch).invalid.tolist() == [True, False]
