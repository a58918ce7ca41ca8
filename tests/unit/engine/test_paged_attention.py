"""The attention ops against dense attention in float64, with NaN in everything that must not be read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from common.engine.attention import paged
from common.engine.attention.paged import PagedAttention
from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.ops.decode_attention import decode_attention, decode_reference
from common.engine.ops.extend_attention import extend_attention
from common.engine.ops.rotary_kv_write import store_in_pages
from tests.fakes.pools import plain_pool

HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = DIM**-0.5
BAD_PAGE = 2**31 - 1


class Cache:
    """Random keys and values, dense and scattered over shuffled pages; NaN and bad ids elsewhere."""

    def __init__(self, lengths: Sequence[int], page_size: int) -> None:
        torch.manual_seed(sum(lengths))
        self.lengths = list(lengths)
        counts = [-(-n // page_size) for n in lengths]
        self.planes = torch.full((2, 1 + sum(counts) + 2, page_size, KV_HEADS, DIM), torch.nan)
        self.planes[:, 0] = 0
        order = (torch.randperm(sum(counts)) + 1).tolist()
        self.page_table = torch.full((len(lengths), max(counts) + 2), BAD_PAGE, dtype=torch.int32)
        self.dense = [torch.randn(2, n, KV_HEADS, DIM) for n in lengths]
        for row, (n, count) in enumerate(zip(lengths, counts, strict=True)):
            pages = torch.tensor([order.pop() for _ in range(count)])
            self.page_table[row, :count] = pages.int()
            where = torch.arange(n)
            self.planes[:, pages[where // page_size], where % page_size] = self.dense[row]

    def expected(self, row: int, query: Tensor, window: int | None) -> Tensor:
        """Return dense attention of query [n, HEADS, DIM], the request's last tokens: [n, HEADS, DIM] in float64."""
        key, value = self.dense[row].double().repeat_interleave(HEADS // KV_HEADS, dim=2)
        scores = torch.einsum("qhd,khd->hqk", query.double(), key) * SCALE
        behind = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))
        hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", probs, value).float()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 5, 300])
def test_extend_equals_dense(page_size: int, window: int | None) -> None:
    cache, query_lens = Cache([1, 9, 700, 640, 33], page_size), [1, 9, 600, 30, 1]
    query = torch.randn(sum(query_lens) + 4, HEADS, DIM)
    query[-4:] = torch.nan  # padding after the last request
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tail = starts, torch.tensor(cache.lengths, dtype=torch.int32), window, SCALE
    out = extend_attention(query, *cache.planes, cache.page_table, *tail)
    for row, part in enumerate(out[:-4].split(query_lens)):
        begin = sum(query_lens[:row])
        expected = cache.expected(row, query[begin : begin + query_lens[row]], window)
        torch.testing.assert_close(part, expected, atol=2e-6, rtol=1e-5)
    assert not out[-4:].any()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 5, 300])
@pytest.mark.parametrize("operation", [decode_attention, decode_reference])
def test_decode_equals_dense(page_size: int, window: int | None, operation: object) -> None:
    assert callable(operation)
    cache = Cache([1, 64, 65, 200, 256, 257, 700, 3], page_size)
    query = torch.randn(len(cache.lengths), HEADS, DIM)
    seq_lens = torch.tensor(cache.lengths, dtype=torch.int32)
    out = operation(query, *cache.planes, cache.page_table, seq_lens, 768, window, SCALE)
    for row in range(len(cache.lengths)):
        expected = cache.expected(row, query[row : row + 1], window)
        torch.testing.assert_close(out[row : row + 1], expected, atol=2e-6, rtol=1e-5)


def test_decode_of_a_request_has_the_same_bits_in_any_company() -> None:
    cache = Cache([70, 100, 5, 400, 128], 16)
    query, seq_lens = torch.randn(5, HEADS, DIM), torch.tensor(cache.lengths, dtype=torch.int32)
    together = decode_attention(query, *cache.planes, cache.page_table, seq_lens, 400, None, SCALE)
    for row in range(5):
        one = slice(row, row + 1)
        table = cache.page_table[one, : -(-cache.lengths[row] // 16)]
        args = table, seq_lens[one], cache.lengths[row], None, SCALE
        assert torch.equal(decode_attention(query[one], *cache.planes, *args), together[one])


def test_a_padding_row_of_a_decode_batch_harms_nobody() -> None:
    cache = Cache([20, 20], 16)
    query = torch.randn(3, HEADS, DIM)
    query[2] = torch.nan
    table = torch.cat([cache.page_table, torch.zeros_like(cache.page_table[:1])])
    seq_lens = torch.tensor([20, 20, 0], dtype=torch.int32)
    for operation in (decode_attention, decode_reference):
        out = operation(query, *cache.planes, table, seq_lens, 32, None, SCALE)
        torch.testing.assert_close(out[:1], cache.expected(0, query[:1], None), atol=2e-6, rtol=1e-5)


def test_storing_scatters_and_keeps_page_zero() -> None:
    planes = torch.zeros(2, 4, 16, KV_HEADS, DIM)
    new = torch.randn(2, 5, KV_HEADS, DIM)
    new[:, 3:] = torch.nan  # padding rows of a poisoned batch
    store_in_pages(*new, *planes, torch.tensor([3 * 16 + 7, 16, 2 * 16 + 15, 0, 9]))
    for plane, values in zip(planes, new, strict=True):
        assert torch.equal(plane[3, 7], values[0])
        assert torch.equal(plane[1, 0], values[1])
        assert torch.equal(plane[2, 15], values[2])
        assert int((plane != 0).any(-1).any(-1).sum()) == 3
    assert not planes[:, 0].any()


def test_storing_converts_to_the_dtype_of_the_pool() -> None:
    planes = torch.zeros(2, 2, 4, KV_HEADS, DIM, dtype=torch.bfloat16)
    new = torch.randn(1, KV_HEADS, DIM)
    store_in_pages(new, new, *planes, torch.tensor([5]))
    assert torch.equal(planes[0, 1, 1], new[0].bfloat16())


def test_the_ops_are_single_calls_that_declare_what_they_write() -> None:
    """The tape and CUDA graphs see one call each, and the copy-in of inputs knows which are mutated."""
    schema = torch.ops.tandem.rotary_kv_write.default._schema
    assert [a.name for a in schema.arguments if a.alias_info is not None] == [
        "qkv",
        "key_plane",
        "value_plane",
    ]
    for name in ("extend_attention", "decode_attention"):
        assert not getattr(torch.ops.tandem, name).default._schema.is_mutable
    query = torch.empty(3, HEADS, DIM, device="meta")
    plane = torch.empty(2, 4, KV_HEADS, DIM, device="meta")
    table = torch.empty(3, 2, dtype=torch.int32, device="meta")
    seq_lens = torch.empty(3, dtype=torch.int32, device="meta")
    assert decode_attention(query, plane, plane, table, seq_lens, 8, None, SCALE).shape == query.shape


def _batch(**changes: object) -> ForwardBatch:
    values: dict[str, object] = {
        "mode": ForwardMode.EXTEND,
        "input_ids": torch.zeros(3, dtype=torch.int64),
        "positions": torch.arange(3),
        "kv_slots": torch.arange(4, 7),
        "page_table": torch.tensor([[1]], dtype=torch.int32),
        "seq_lens": torch.tensor([3], dtype=torch.int32),
        "query_start": torch.tensor([0, 3], dtype=torch.int32),
        "logits_rows": torch.tensor([2]),
        "max_seq_len": 3,
        "query_lens_host": (3,),
        "seq_lens_host": (3,),
    }
    return ForwardBatch(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_lens_host": None}, "needs query_lens_host"),
        ({"seq_lens_host": None}, "needs query_lens_host"),
        ({"query_lens_host": (4,)}, "do not fit 3 tokens"),
        ({"query_lens_host": (1, 2)}, "do not fit 3 tokens"),
        ({"seq_lens_host": (5,)}, "does not fit 1 pages"),
    ],
)
def test_plan_refuses_host_lengths_that_do_not_fit(changes: dict[str, object], message: str) -> None:
    attention = PagedAttention(plain_pool(1, KV_HEADS, DIM, 4, 3, torch.float32, "cpu"), [None])
    with pytest.raises(ValueError, match=message):
        attention.plan(_batch(**changes))


def test_forward_needs_a_plan_and_windows_fit_the_pool() -> None:
    pool = plain_pool(1, KV_HEADS, DIM, 4, 3, torch.float32, "cpu")
    query = torch.zeros(1, HEADS, DIM)
    with pytest.raises(RuntimeError, match="plan"):
        PagedAttention(pool, [None]).forward(0, query, query[:, :KV_HEADS], query[:, :KV_HEADS])
    with pytest.raises(ValueError, match="0 attention windows"):
        PagedAttention(pool, [])


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.VERIFY])
def test_the_attention_of_prompts_refuses_steps_of_decode_nodes(mode: ForwardMode) -> None:
    pool = plain_pool(1, KV_HEADS, DIM, 4, 3, torch.float32, "cpu")
    attention, query = PagedAttention(pool, [None]), torch.zeros(3, HEADS, DIM)
    attention.plan(_batch(mode=mode))
    with pytest.raises(ValueError, match="need StepAttention"):
        attention.forward(0, query, query[:, :KV_HEADS], query[:, :KV_HEADS])


def test_the_counts_of_programs_are_made_before_any_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that asks for them first fails, and its second attempt takes memory of its own."""
    made: list[torch.device] = []
    monkeypatch.setattr(paged, "ended_programs", made.append)
    pool = plain_pool(1, KV_HEADS, DIM, 16, 3, torch.float32, "cpu")
    PagedAttention(pool, (None,))
    assert made == [pool.device]


def test_layers_share_the_plan_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph plans by itself, although runs for the same batch precede its capture."""
    made: list[Tensor] = []
    used: list[Tensor | None] = []

    def plan(*given: object) -> Tensor:
        made.append(torch.zeros(1))
        return made[-1]

    def attend(query: Tensor, *given: object) -> Tensor:
        used.append(given[-1])  # type: ignore[arg-type]
        return query

    monkeypatch.setattr(paged, "hopper_serves", lambda query, plane, window, scales: window is None)
    monkeypatch.setattr(paged, "plan_prompts", plan)
    monkeypatch.setattr(paged, "extend_attention", attend)
    attention = PagedAttention(plain_pool(4, KV_HEADS, DIM, 4, 3, torch.float32, "cpu"), [8, None, 8, None])
    query = torch.zeros(3, HEADS, DIM)

    def run(layers: Sequence[int]) -> list[int | None]:
        """Return for each layer which of the plans it used."""
        used.clear()
        for layer in layers:
            attention.forward(layer, query, query[:, :KV_HEADS], query[:, :KV_HEADS])
        known = [id(each) for each in made]
        return [None if each is None else known.index(id(each)) for each in used]

    attention.plan(_batch())
    assert run(range(4)) == [None, 0, None, 0]
    assert run(range(4)) == [None, 1, None, 1]
    assert run([3, 3]) == [2, 3]
    attention.plan(_batch())
    assert run([3]) == [4]
