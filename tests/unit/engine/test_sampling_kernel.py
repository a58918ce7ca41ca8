"""The sampling kernel in Triton's interpreter: the same random words and tokens, valid ids for any input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.engine.ops.best_tokens import best_tokens_reference, best_tokens_triton, winning_tokens
from common.engine.ops.filter_floor import filter_floor_reference, filter_floor_triton
from common.engine.ops.philox import token_words
from common.engine.ops.sample_tokens import (
    gumbel,
    gumbel_of_words,
    sample_tokens_reference,
    sample_tokens_triton,
)
from common.engine.ops.triton_kernel import kernel, tl
from common.kv_cache.shard import Shard

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]


@kernel
def _noise_kernel(words_ptr, out_ptr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, COUNT)
    tl.store(out_ptr + index, gumbel_of_words(tl.load(words_ptr + index).to(tl.uint32)))


def test_noise_equals_the_reference_over_the_whole_range() -> None:
    words = torch.cat(
        [torch.randint(0, 1 << 32, (1000,)), torch.arange(12), (1 << 32) - 1 - torch.arange(12)]
    )
    words = torch.cat([words, words[: 1024 - len(words)]])
    words[:32] = 2 ** torch.arange(32)
    out = torch.empty(1024)
    _noise_kernel[(1,)](words, out, COUNT=1024)
    torch.testing.assert_close(out, gumbel(words), atol=5e-6, rtol=1e-6)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("vocab", [50, 9000])
def test_tokens_equal_the_reference(vocab: int, filtered: bool) -> None:
    torch.manual_seed(vocab)
    rows = 12
    logits = torch.randn(rows, vocab)
    temperature = torch.rand(rows) + 0.5
    temperature[::4] = 0.0
    seed = torch.randint(0, 2**62, (rows,))
    seed[1], seed[2] = -5, (1 << 62) + 5
    position = torch.randint(0, 1 << 34, (rows,))
    floor = torch.rand(rows) if filtered else None
    args = logits, temperature, seed, position, floor, False
    tokens, invalid = sample_tokens_triton(*args)
    assert torch.equal(tokens, sample_tokens_reference(*args)[0])
    assert not invalid.any()
    assert not torch.equal(
        tokens, sample_tokens_triton(logits, temperature, seed, position + 1, floor, False)[0]
    )
    greedy = sample_tokens_triton(logits, 0 * temperature, seed, position, floor, True)[0]
    assert torch.equal(greedy, logits.argmax(-1))


@pytest.mark.parametrize("best", [best_tokens_triton, best_tokens_reference])
@pytest.mark.parametrize("vocab", [50, 9000])
def test_the_best_of_the_ranks_tokens_are_the_tokens_of_one_rank(
    vocab: int, best: Callable[..., Tensor]
) -> None:
    """Shares of unequal sizes, ties between ranks, and rows that are not finite."""
    torch.manual_seed(vocab)
    rows = 16
    logits = torch.randn(rows, vocab)
    logits[10] = 0.0
    logits[11, 3], logits[12, vocab - 1], logits[13, 0] = torch.nan, torch.nan, torch.inf
    logits[14] = -torch.inf
    logits[15, : vocab // 2] = -torch.inf
    temperature = torch.rand(rows) + 0.5
    temperature[::2] = 0.0
    seed, position = torch.randint(0, 2**62, (rows,)), torch.randint(0, 1 << 34, (rows,))
    for given in (temperature, 0 * temperature):
        greedy = not given.any()
        tokens, invalid = sample_tokens_reference(logits, given, seed, position, None, greedy)
        for size in (1, 2, 3):
            shares = [Shard(rank, size).tokens(vocab) for rank in range(size)]
            candidates = [
                best(logits[:, share.start : share.stop], given, seed, position, share.start, greedy)
                for share in shares
            ]
            found, failed = winning_tokens(torch.stack(candidates, dim=1))
            assert torch.equal(failed, invalid)
            assert torch.equal(found[~invalid], tokens[~invalid])
            assert ((found >= 0) & (found < vocab)).all()


def test_the_word_of_a_token_is_the_one_of_philox() -> None:
    """With equal logits the token with the smallest word wins, because small values mean large noise."""
    seed, position = torch.tensor([7, -1]), torch.tensor([1 << 33, 3])
    tokens, _ = sample_tokens_triton(torch.zeros(2, 5000), torch.ones(2), seed, position, None, False)
    assert torch.equal(tokens, token_words(seed, position, 5000).argmin(-1))


def test_ties_take_the_lowest_index_and_bad_rows_are_reported_with_a_valid_id() -> None:
    logits = torch.zeros(7, 9000)
    logits[0, [4097, 8000, 4500]] = 5.0
    logits[1, 17] = torch.nan
    logits[2] = torch.nan
    logits[3] = -torch.inf
    logits[4, 3] = torch.inf
    logits[5, 3] = -torch.inf
    logits[6, 8999] = torch.nan
    for temperature in (0.0, 1.0):
        many = torch.full((7,), temperature), torch.arange(7), torch.arange(7)
        tokens, invalid = sample_tokens_triton(logits, *many, None, False)
        assert invalid.tolist() == [False, True, True, True, True, False, True]
        assert ((tokens >= 0) & (tokens < 9000)).all()
        if temperature == 0.0:
            assert tokens[0] == 4097
            assert tokens[5] == 0


@pytest.mark.parametrize("vocab", [50, 9000])
def test_the_floor_of_the_filters_equals_the_reference(vocab: int) -> None:
    torch.manual_seed(vocab)
    rows = 16
    logits = 3 * torch.randn(rows, vocab)
    logits[2, 10:] = -torch.inf
    logits[3] = logits[3].round()  # many ties
    logits[4] = 1.0
    temperature = torch.rand(rows) + 0.5
    top_k = torch.tensor([0, 5, 20, 7, 3, 1, 0, 0, 40, 10_000, 2, 0, 0, 9, 30, 0], dtype=torch.int32)
    top_p = torch.tensor([1, 1, 1, 1, 0.5, 1, 0.9, 0.0, 0.7, 0.99, 0.01, 0.5, 0.999, 1.0, 0.3, 1e-9])
    min_p = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 0.1, 0, 0.5, 0.3, 0.01, 1.0, 0.2, 1e-9])
    args = logits, temperature, top_k, top_p, min_p
    actual, expected = filter_floor_triton(*args), filter_floor_reference(*args)
    for row in range(rows):
        kept, wanted = logits[row] >= actual[row], logits[row] >= expected[row]
        assert torch.equal(kept, wanted), row


@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_floor_ends_on_bad_rows() -> None:
    logits = torch.zeros(4, 50)
    logits[0], logits[1, 3], logits[2] = torch.nan, torch.nan, -torch.inf
    logits[3, 7] = torch.inf
    logits[3, :5] = torch.finfo(torch.float32).min
    logits[0, :9] = torch.linspace(-3e38, 3e38, 9)
    ones = torch.ones(4)
    filter_floor_triton(logits, ones, 3 * ones.int(), 0.5 * ones, 0.1 * ones)
