"""Sampling: the published random words, the distribution, the filters, and independence of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.layers.logit_rows import LogitRows
from common.engine.ops.filter_floor import filter_floor
from common.engine.ops.philox import philox, token_words
from common.engine.ops.sample_tokens import gumbel
from common.engine.sampling.logit_masks import LogitMasks
from common.engine.sampling.sampler import SamplingBatch, read_tokens, sample, sample_rows
from common.messages.generation import OutputToken


def filter_top_k_top_p(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return logits [R, V] divided by the temperature, with -inf for what `filter_floor` removes."""
    floor = filter_floor(scaled, torch.ones_like(top_p), top_k, top_p, torch.zeros_like(top_p))
    return scaled.masked_fill(scaled < floor[:, None], -torch.inf)


def make(rows: int, **values: object) -> SamplingBatch:
    """Make a batch whose rows share the given scalars or take the given tensors."""
    spec = {
        "temperature": (1.0, torch.float32),
        "top_p": (1.0, torch.float32),
        "top_k": (0, torch.int32),
        "min_p": (0.0, torch.float32),
        "seed": (7, torch.int64),
        "position": (0, torch.int64),
    }
    tensors = {
        key: torch.as_tensor(values.pop(key, default)).to(dtype).expand(rows).clone()
        for key, (default, dtype) in spec.items()
    }
    facts = {"all_greedy": False, "any_filter": True, "num_logprobs": None}
    return SamplingBatch(**tensors, **{**facts, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    """The known-answer vectors are those of Random123 (kat_vectors, philox4x32 10)."""
    out = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in out) == words


def test_token_words_are_keyed_by_seed_position_and_token() -> None:
    seed, position = (1 << 62) + 5, (1 << 33) + 9
    table = token_words(torch.tensor([seed, 5]), torch.tensor([position, 9]), 6)
    for token in range(6):
        counter = (token, position & 0xFFFFFFFF, position >> 32, 0)
        key = (seed & 0xFFFFFFFF, seed >> 32)
        words = philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))  # type: ignore[arg-type]
        assert int(table[0, token]) == int(words[0])
    assert not (table[0] == table[1]).any()
    assert table.min() >= 0
    assert table.max() < 1 << 32


LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])


def chi_squared(token_ids: Tensor, probs: Tensor) -> float:
    counts = torch.bincount(token_ids, minlength=len(probs)).double()
    live = probs > 0
    assert counts[~live].sum() == 0
    expected = probs[live].double() * len(token_ids)
    return float(((counts[live] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("values", "probs"),
    [
        ({}, LOGITS.softmax(-1)),
        ({"temperature": 0.5}, (LOGITS / 0.5).softmax(-1)),
        ({"temperature": 3.0}, (LOGITS / 3).softmax(-1)),
        ({"top_k": 3}, LOGITS.masked_fill(torch.arange(8) > 2, -torch.inf).softmax(-1)),
        ({"top_p": 0.7}, LOGITS.masked_fill(torch.arange(8) > 2, -torch.inf).softmax(-1)),
        # top-k first: of the best two, renormalized, the first has 0.62 >= 0.6 by itself
        ({"top_k": 2, "top_p": 0.6}, LOGITS.masked_fill(torch.arange(8) > 0, -torch.inf).softmax(-1)),
        # temperature before top-p: the flat distribution needs four tokens
        (
            {"temperature": 3.0, "top_p": 0.7},
            (LOGITS / 3).masked_fill(torch.arange(8) > 4, -torch.inf).softmax(-1),
        ),
    ],
)
@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_follow_the_distribution(values: dict[str, object], probs: Tensor, by: str) -> None:
    rows = 20_000
    batch = make(rows, **values, **{by: torch.arange(rows)})
    drawn = sample(LOGITS.expand(rows, -1), batch).token_ids
    assert chi_squared(drawn, probs) < 24.3  # 0.999 quantile at 7 degrees of freedom


def test_the_same_seed_and_position_draw_the_same_token_in_any_batch() -> None:
    torch.manual_seed(0)
    rows, vocab = 40, 500
    logits = torch.randn(rows, vocab)
    values = {
        "temperature": torch.rand(rows) + 0.5,
        "top_p": torch.rand(rows) * 0.5 + 0.5,
        "top_k": torch.randint(0, 50, (rows,)),
        "seed": torch.randint(0, 2**62, (rows,)),
        "position": torch.randint(0, 4096, (rows,)),
    }
    values["temperature"][::5] = 0.0
    together = sample(logits, make(rows, **values)).token_ids
    order = torch.randperm(rows)
    shuffled = sample(logits[order], make(rows, **{k: v[order] for k, v in values.items()})).token_ids
    assert torch.equal(shuffled, together[order])
    for row in (0, 1, 17):
        alone = sample(logits[row : row + 1], make(1, **{k: v[row] for k, v in values.items()}))
        assert alone.token_ids[0] == together[row]
    other = {**values, "position": values["position"] + 1}
    assert not torch.equal(sample(logits, make(rows, **other)).token_ids, together)


def test_greedy_rows_take_the_lowest_index_of_the_maximum_also_in_a_mixed_batch() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    for batch in (
        make(2, temperature=0.0, all_greedy=True),
        make(2, temperature=9e-6, top_k=2, top_p=0.1),
        make(2, temperature=torch.tensor([0.0, 1e-6])),
    ):
        assert sample(logits, batch).token_ids.tolist() == [1, 0]


def test_a_mixed_batch_draws_its_random_rows() -> None:
    rows = 20_000
    temperature = torch.ones(rows)
    temperature[::2] = 0.0
    batch = make(rows, temperature=temperature, position=torch.arange(rows), any_filter=False)
    drawn = sample(LOGITS.expand(rows, -1), batch).token_ids
    assert not drawn[::2].any()
    assert chi_squared(drawn[1::2], LOGITS.softmax(-1)) < 24.3


def kept(logits: list[float], top_k: int = 0, top_p: float = 1.0) -> list[int]:
    scaled = torch.tensor([logits])
    out = filter_top_k_top_p(scaled, torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]))
    assert torch.equal(out[out.isfinite()], scaled[out.isfinite()])
    return out[0].isfinite().nonzero()[:, 0].tolist()


def test_filter_edges() -> None:
    probs = [0.1, 0.4, 0.2, 0.3]
    logits = torch.tensor(probs).log().tolist()
    assert kept(logits) == [0, 1, 2, 3]
    assert kept(logits, top_k=1) == [1]
    assert kept(logits, top_k=2) == [1, 3]
    assert kept(logits, top_k=4) == [0, 1, 2, 3]
    assert kept(logits, top_k=1000) == [0, 1, 2, 3]
    assert kept(logits, top_p=1e-9) == [1]  # at least one
    assert kept(logits, top_p=0.0) == [1]
    assert kept(logits, top_p=0.39) == [1]
    assert kept(logits, top_p=0.41) == [1, 3]  # the token that reaches the mass is kept
    assert kept(logits, top_p=0.95) == [0, 1, 2, 3]
    assert kept(logits, top_k=3, top_p=0.75) == [1, 3]  # 0.4 + 0.3 of 0.9
    assert kept([1.0, 1.0, 0.0, 1.0], top_k=1) == [0, 1, 3]  # ties are kept together
    assert kept([0.0, -torch.inf, -1.0], top_k=3, top_p=0.999) == [0, 2]


def test_top_p_of_one_removes_nothing_whatever_the_sums_round_to() -> None:
    torch.manual_seed(0)
    assert len(kept(torch.randn(50_000).tolist())) == 50_000
    assert kept([30.0, 0.0, 1.0]) == [0, 1, 2]  # the first one's probability rounds to 1


def test_noise_is_finite_at_both_ends_of_the_random_words() -> None:
    noise = gumbel(torch.tensor([0, 1, (1 << 32) - 2, (1 << 32) - 1]))
    assert noise.isfinite().all()
    assert noise[0] > 22
    assert noise[-1] < -2.8
    assert (noise.diff() <= 0).all()


def test_rows_of_one_batch_are_filtered_each_by_its_own() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(3, -1)
    out = filter_top_k_top_p(
        logits, torch.tensor([0, 2, 0], dtype=torch.int32), torch.tensor([1.0, 1.0, 0.3])
    )
    assert out.isfinite().sum(-1).tolist() == [4, 2, 1]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 50)
    batch = make(6, temperature=0.3, top_k=4, position=torch.arange(6), num_logprobs=3)
    out = sample(logits, batch)
    expected = logits.log_softmax(-1)
    assert out.logprobs is not None
    assert out.top_ids is not None
    assert out.top_logprobs is not None
    torch.testing.assert_close(out.logprobs, expected[torch.arange(6), out.token_ids])
    assert torch.equal(out.top_ids, expected.sort(descending=True).indices[:, :3])
    torch.testing.assert_close(out.top_logprobs, expected.gather(1, out.top_ids))
    none = sample(logits, make(6, num_logprobs=0))
    assert none.logprobs is not None
    assert none.top_ids is not None
    assert none.top_ids.shape == (6, 0)
    assert sample(logits, make(6)).logprobs is None
    assert sample(logits, make(6, num_logprobs=99)).top_ids.shape == (6, 50)  # type: ignore[union-attr]


def test_every_request_reads_the_logprobs_that_it_asked_for() -> None:
    logits = LOGITS.repeat(4, 1)
    logits[3, 0] = torch.nan
    out = sample(logits, make(4, temperature=0.0, all_greedy=True, num_logprobs=3)).on_host()
    plain, own, top, invalid = read_tokens(out, [None, 0, 2, 3])
    assert (plain, invalid) == (OutputToken(0), None)
    expected = LOGITS.log_softmax(-1).tolist()
    for token, count in ((own, 0), (top, 2)):
        assert token is not None
        assert token.logprob is not None
        assert token.id == 0
        assert token.logprob.logprob == pytest.approx(expected[0])
        assert token.logprob.top_ids == (0, 1)[:count]
        assert token.logprob.top_logprobs == pytest.approx(tuple(expected[:count]))
    ids = torch.tensor([[7, 2], [7, 2], [1, 0], [0, 0]])
    chosen = sample(
        logits, make(4, temperature=0.0, all_greedy=True, num_logprobs=0, logprob_ids=ids)
    ).on_host()
    for token, wanted in zip(read_tokens(chosen, [0, 0, 0, 0], [2, 1, 0, 0]), ((7, 2), (7,), ())):
        assert token is not None
        assert token.logprob is not None
        assert token.logprob.chosen == pytest.approx([expected[each] for each in wanted])
    without = sample(LOGITS[None], make(1, temperature=0.0, all_greedy=True))
    assert read_tokens(without, [2]) == [OutputToken(0)]


ALL_BUT_LAST = torch.tensor([[0x7F]], dtype=torch.int32)  # of eight tokens


class _DividedRows(LogitRows):
    """Logits of which every rank has a part; here the part is all of them."""

    divided = True
    gathers = 0

    def whole(self) -> Tensor:
        self.gathers += 1
        return super().whole()


@pytest.mark.parametrize(
    ("values", "gathers"),
    [
        ({"any_filter": False}, 0),
        ({"any_filter": False, "temperature": 0.0, "all_greedy": True}, 0),
        ({"temperature": 0.0, "all_greedy": True}, 0),
        ({"top_k": 3}, 1),
        ({"any_filter": False, "num_logprobs": 0}, 1),
        ({"any_filter": False, "masks": LogitMasks(ALL_BUT_LAST, torch.tensor([0, -1]))}, 1),
    ],
)
def test_ranks_gather_whole_logits_only_where_a_draw_needs_them(
    values: dict[str, object], gathers: int
) -> None:
    divided = _DividedRows(LOGITS.repeat(2, 1))
    batch = make(2, seed=torch.tensor([3, 4]), **values)
    drawn = sample_rows(divided, batch)
    assert divided.gathers == gathers
    assert drawn.token_ids.tolist() == sample(LOGITS.repeat(2, 1), batch).token_ids.tolist()
    assert drawn.invalid.tolist() == [False, False]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_mean_nothing_are_flagged_by_row(bad: float) -> None:
    logits = torch.zeros(4, 8)
    logits[1, 3] = bad
    logits[2] = -torch.inf
    logits[3, :7] = -torch.inf  # one allowed token is valid
    for batch in (make(4), make(4, temperature=0.0, all_greedy=True)):
        out = sample(logits, batch)
        assert out.invalid.tolist() == [False, True, True, False]
        assert out.token_ids[3] == 7


def test_a_single_token_left_by_the_filter_is_drawn_for_every_random_word() -> None:
    rows = 50_000
    batch = make(rows, top_k=1, position=torch.arange(rows))
    assert sample(LOGITS.flip(0).expand(rows, -1), batch).token_ids.eq(7).all()
