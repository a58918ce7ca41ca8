"""Compiled kernels, compared with their torch references on the same GPU, in the dtypes that are served."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from common.engine.attention import prompt_attention
from common.engine.attention.prompt_attention import PromptAttention
from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.ops.decode_attention import decode_attention, decode_triton
from common.engine.ops.extend_attention import extend_attention
from common.engine.ops.filter_floor import filter_floor, filter_floor_reference
from common.engine.ops.held_requests import hold_requests, hold_requests_reference
from common.engine.ops.keep_hidden import keep_hidden, keep_hidden_reference
from common.engine.ops.key_parts import Division
from common.engine.ops.linear import gated_linear, linear, linear_reference
from common.engine.ops.linear_norm import linear_add_rms_norm, linear_add_rms_norm_reference
from common.engine.ops.mask_logits import mask_logits, mask_logits_reference
from common.engine.ops.output_norm import (
    add_normed,
    add_normed_rms_norm,
    add_normed_rms_norm_reference,
)
from common.engine.ops.penalise import penalise, penalise_reference
from common.engine.ops.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from common.engine.ops.rotary import (
    rotary_angles,
    rotary_angles_by_axis,
    rotary_angles_by_axis_reference,
    rotary_angles_reference,
)
from common.engine.ops.rotary_kv_write import (
    rotary_kv_write,
    rotary_kv_write_reference,
    rotary_qk,
    rotary_qk_reference,
)
from common.engine.ops.round_inputs import (
    gather_rows,
    gather_rows_reference,
    window_places,
    window_places_reference,
)
from common.engine.ops.sample_tokens import sample_tokens, sample_tokens_reference
from common.engine.ops.sigmoid_gate import sigmoid_gate, sigmoid_gate_reference
from common.engine.ops.silu_mul import gelu_mul, gelu_mul_reference, silu_mul, silu_mul_reference
from common.engine.ops.step_rows import (
    advance_rows,
    advance_rows_reference,
    step_rows,
    step_rows_reference,
)
from common.engine.ops.tiles import choose_tiles
from common.engine.ops.token_norm import token_norm, token_norm_reference
from common.engine.ops.top_tokens import top_tokens, top_tokens_reference
from common.engine.ops.triton_kernel import multiprocessors
from common.engine.ops.verify_attention import verify_attention, verify_reference, verify_triton
from common.engine.ops.vocabulary_rows import vocabulary_rows, vocabulary_rows_reference
from tests.fakes.pools import plain_pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(240),
]
BAD_PAGE = 2**31 - 1
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CUDA = "cuda"


def close(actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    limit = scale * TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=limit, rtol=limit, equal_nan=True)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=CUDA).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 300])
def test_rows_of_a_part_of_the_vocabulary(dtype: torch.dtype, rows: int) -> None:
    weight, ids = normal(500, 4096, dtype=dtype), torch.arange(rows, device=CUDA) * 37 % 900
    expected = vocabulary_rows_reference(ids, weight, 300)
    assert torch.equal(vocabulary_rows(ids, weight, 300), expected)
    assert torch.equal(vocabulary_rows(torch.stack((ids, ids), 1)[:, 0], weight, 300), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 300])
def test_rms_norm_and_silu_mul(dtype: torch.dtype, rows: int) -> None:
    x, residual, weight = (normal(*shape, dtype=dtype) for shape in ((rows, 4096), (rows, 4096), (4096,)))
    close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = add_rms_norm_reference(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    close(normed, expected)
    gate_up = normal(rows, 2 * 14336, dtype=dtype)
    close(silu_mul(gate_up), silu_mul_reference(gate_up))
    close(gelu_mul(gate_up), gelu_mul_reference(gate_up))
    merged = normal(rows, 3 * 4096, dtype=dtype)
    close(sigmoid_gate(x, merged[:, 4096:8192]), sigmoid_gate_reference(x, merged[:, 4096:8192]))
    offset = 1 + weight.float()
    close(rms_norm(x, offset, 1e-5), rms_norm_reference(x, offset, 1e-5))
    close(add_rms_norm(x, residual, offset, 1e-5)[0], rms_norm_reference(total, offset, 1e-5))
    for gain in (weight, offset):
        pair = add_normed_rms_norm(x, residual, gain, gain, 1e-5)
        # A normed value of up to 16 is rounded before it is added, and the sum may be near zero.
        expected_pair = add_normed_rms_norm_reference(x, residual, gain, gain, 1e-5)
        for found, expected in zip(pair, expected_pair):
            close(found, expected, scale=4)
        close(add_normed(x, residual, gain, 1e-5), expected_pair[1], scale=4)
        ours, theirs = merged.clone(), merged.clone()
        token_norm(ours, gain, gain, 1e-5)
        token_norm_reference(theirs, gain, gain, 1e-5)
        close(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dims", [128, 64, 32])
def test_rotary_kv_write(dtype: torch.dtype, norm: bool, dims: int) -> None:
    heads, kv_heads, dim, page_size, tokens = 32, 8, 128, 16, 77
    positions = torch.randint(0, 100_000, (tokens,), device=CUDA)
    inv_freq = 500000.0 ** (-torch.arange(0, dims, 2, device=CUDA) / dims)
    cos, sin = rotary_angles(positions, inv_freq, 1.0, dtype)
    for actual, expected in zip((cos, sin), rotary_angles_reference(positions, inv_freq, 1.0, dtype)):
        close(actual, expected)
    qkv = normal(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    qkv[70:] = torch.nan
    slots = torch.randperm(31 * page_size, device=CUDA)[:tokens] + page_size
    slots[70:] = 5
    weights = (normal(dim, dtype=dtype), normal(dim, dtype=dtype)) if norm else (None, None)
    results = []
    for run in (rotary_kv_write_reference, rotary_kv_write):
        ours, planes = qkv.clone(), torch.zeros(2, 32, page_size, kv_heads, dim, dtype=dtype, device=CUDA)
        run(ours, cos, sin, *weights, 1e-6, *planes, slots)
        results.append((ours, planes))
    for actual, expected in zip(results[1], results[0]):
        limit = 4 * TOLERANCE[dtype]  # the reference rounds between the products
        torch.testing.assert_close(actual, expected, atol=limit, rtol=limit, equal_nan=True)
    assert not results[1][1][:, 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_angles_by_axis(dtype: torch.dtype) -> None:
    positions = torch.randint(0, 100_000, (1000, 3), device=CUDA)
    inv_freq = 1e6 ** (-torch.arange(0, 128, 2, device=CUDA) / 128)
    axes = torch.tensor([0] * 16 + [1] * 24 + [2] * 24, device=CUDA)
    args = positions, axes, inv_freq, 1.0, dtype
    for actual, expected in zip(rotary_angles_by_axis(*args), rotary_angles_by_axis_reference(*args)):
        close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_angles(dtype: torch.dtype) -> None:
    positions = torch.randint(0, 100_000, (1000,), device=CUDA)
    inv_freq = 5e5 ** (-torch.arange(0, 128, 2, device=CUDA) / 128)
    args = positions, inv_freq, 0.9, dtype
    for actual, expected in zip(rotary_angles(*args), rotary_angles_reference(*args), strict=True):
        close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_qk(dtype: torch.dtype) -> None:
    """Heads have 80 values, as in Qwen2.5-VL's tower; angles are float32."""
    angles = 6.3 * torch.rand(300, 1, 40, device=CUDA)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    qkv = normal(300, 3, 16, 80, dtype=dtype)
    expected = qkv.clone()
    rotary_qk_reference(expected, cos, sin)
    rotary_qk(qkv, cos, sin)
    close(qkv, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 4, 16, 17, 64, 100, 129])
@pytest.mark.parametrize(
    ("size", "depth"),
    [(6144, 4096), (4096, 14336), (32000, 4096), (5120, 2048), (2048, 4096), (704, 256), (100, 96)],
)
def test_linear(dtype: torch.dtype, rows: int, size: int, depth: int) -> None:
    """The first row computed by itself is bit for bit the same where the kernel is this project's own."""
    processors = multiprocessors(torch.device(CUDA))
    x, weight = normal(rows, depth, dtype=dtype), normal(size, depth, dtype=dtype) / depth**0.5
    for bias in (None, normal(size, dtype=dtype)):
        out = linear(x, weight, bias)
        wide = None if bias is None else bias.double()
        close(out, linear_reference(x.double(), weight.double(), wide))
        if choose_tiles(rows, size, processors) is not None:
            assert torch.equal(linear(x[:1], weight, bias), out[:1])


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 64, 65, 128, 129])
def test_gated_linear(rows: int) -> None:
    x, weight = normal(rows, 512, dtype=torch.bfloat16), normal(28672, 512, dtype=torch.bfloat16) / 512**0.5
    close(gated_linear(x, weight, None), silu_mul_reference(x @ weight.T))
    close(gated_linear(x, weight, None, "gelu_tanh"), gelu_mul_reference(x @ weight.T))


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 40, 64, 128, 129])
@pytest.mark.parametrize(
    ("size", "depth"), [(4096, 4096), (4096, 14336), (2048, 4096), (2048, 8192), (1024, 3072), (1536, 8960)]
)
def test_a_product_and_the_norm_after_it(rows: int, size: int, depth: int) -> None:
    x, weight = (
        normal(rows, depth, dtype=torch.bfloat16),
        normal(size, depth, dtype=torch.bfloat16) / depth**0.5,
    )
    stream, gain = normal(rows, size, dtype=torch.bfloat16), normal(size, dtype=torch.bfloat16)
    expected = linear_add_rms_norm_reference(
        x.double(), weight.double(), None, stream.double(), gain.double(), 1e-5
    )
    normed, summed = linear_add_rms_norm(x, weight, None, stream, gain, 1e-5)
    close(summed, expected[1])
    # A product of magnitude 4 to 8 is rounded by up to 2**-6; where the stream cancels it, the gain scales that error.
    torch.testing.assert_close(normed.double(), expected[0], atol=6e-2, rtol=1.6e-2)


def test_chained_kernels_wait_for_each_other() -> None:
    """Each kernel may be launched while the previous one runs, and rows pass through all of them in a graph.

    A kernel that read too early, or wrote into memory that is still read, would change the result from that of one
    kernel at a time.
    """
    weights = [normal(16384, 1024, dtype=torch.bfloat16) / 32 for _ in range(4)]
    narrow = normal(1024, 16384, dtype=torch.bfloat16) / 128
    gain, start = torch.ones(1024, dtype=torch.bfloat16, device=CUDA), normal(4, 1024, dtype=torch.bfloat16)

    def around(x: Tensor, settle: Callable[[], None]) -> Tensor:
        for _ in range(10):
            for weight in weights:
                wide = linear(x, weight, None)
                settle()
                gated = gated_linear(x, weight, None)
                settle()
                halves = silu_mul(wide)
                settle()
                x, total = add_rms_norm(halves[:, :1024], gated[:, -1024:], gain, 1e-5)
                settle()
                x, total = add_rms_norm(x, total, gain, 1e-5)
                settle()
                x, _ = linear_add_rms_norm(wide, narrow, None, total, gain, 1e-5)
                settle()
        return x

    expected = around(start, torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = around(start, lambda: None)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def test_the_integers_of_a_round() -> None:
    """The results are equal for rows in the middle of a host transfer and for depths that all requests share."""
    rows, width, count = 65, 515, 33
    state = (
        torch.randint(1 << 40, (rows,), device=CUDA),
        torch.randint(8000, (rows,), device=CUDA).int(),
        -torch.randint(900, (rows,), device=CUDA),
    )
    pages = torch.randint(1, 1 << 30, (rows, width), device=CUDA).int()
    placed = torch.stack([torch.randint(n, (count,), device=CUDA) for n in (rows, width, 9)], 1)[:, :2]
    gathered = gather_rows(placed, *state, pages)
    for actual, expected in zip(gathered, gather_rows_reference(placed, *state, pages)):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    _, lengths, delta, table = gathered
    for depth in (torch.arange(7, device=CUDA).expand(count, -1), torch.randint(5, (count, 3), device=CUDA)):
        args = lengths, delta, table, depth, 4, 16
        for actual, expected in zip(window_places(*args), window_places_reference(*args)):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)


def test_both_ends_of_a_decode_step() -> None:
    """The results equal the reference over a long page table and more rows than a program has."""
    rows, width = 1500, 1030
    last, delta = torch.randint(1 << 40, (rows,), device=CUDA), -torch.randint(900, (rows,), device=CUDA)
    seq_len = torch.randint(16 * width, (rows,), device=CUDA).int()
    pages = torch.randint(1, 1 << 30, (rows, width), device=CUDA).int()
    chosen = torch.randperm(rows, device=CUDA)[: rows - 200]
    for count in (1, 33, len(chosen)):
        args = chosen[:count].contiguous(), last, seq_len, delta, pages, 16
        for actual, expected in zip(step_rows(*args), step_rows_reference(*args), strict=True):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)
        tokens, lengths = (torch.randint(900, (count,), device=CUDA) for _ in range(2))
        ours, theirs = (last.clone(), seq_len.clone()), (last.clone(), seq_len.clone())
        advance_rows(chosen[:count], tokens, lengths.int(), *ours)
        advance_rows_reference(chosen[:count], tokens, lengths.int(), *theirs)
        for actual, expected in zip(ours, theirs, strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("count", [1, 33, 64])
def test_requests_that_a_prompt_graph_holds(count: int) -> None:
    """The copy equals the reference, with pages past those of one program, and keeps what is beyond."""
    pages = torch.randint(1, 1 << 30, (count, 1030), device=CUDA).int()
    starts = torch.arange(0, 5 * count + 1, 5, device=CUDA).int()
    found = []
    for run in (hold_requests, hold_requests_reference):
        held = [torch.full(size, 7, dtype=torch.int32, device=CUDA) for size in ((64, 1100), (65,), (64,))]
        run(pages, starts, starts[1:].contiguous(), *held)
        found.append(held)
    for actual, expected in zip(*found, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("count", [1, 8])
def test_top_tokens(count: int) -> None:
    logits = 3 * torch.randn(9, 32000, device=CUDA)
    logits[4] = torch.nan
    probs, ids = top_tokens(logits, count)
    expected, expected_ids = top_tokens_reference(logits, count)
    assert ((ids >= 0) & (ids < 32000)).all()
    live = torch.arange(9, device=CUDA) != 4
    assert torch.equal(ids[live], expected_ids[live])
    close(probs[live], expected[live])


class Cache:
    """A cache of random keys and values over shuffled pages; NaN and bad page ids elsewhere."""

    def __init__(
        self, lengths: Sequence[int], page_size: int, kv_heads: int, dim: int, dtype: torch.dtype
    ) -> None:
        counts = [-(-n // page_size) for n in lengths]
        shape = (2, 1 + sum(counts), page_size, kv_heads, dim)
        self.planes = torch.full(shape, torch.nan, dtype=dtype, device=CUDA)
        order = (torch.randperm(sum(counts)) + 1).tolist()
        self.page_table = torch.full((len(lengths), max(counts) + 2), BAD_PAGE, dtype=torch.int32)
        self.dense = [normal(2, n, kv_heads, dim, dtype=dtype) for n in lengths]
        for row, (n, count) in enumerate(zip(lengths, counts)):
            pages = torch.tensor([order.pop() for _ in range(count)])
            self.page_table[row, :count] = pages.int()
            where = torch.arange(n)
            page = pages[where // page_size].to(CUDA)
            self.planes[:, page, (where % page_size).to(CUDA)] = self.dense[row]
        self.page_table = self.page_table.to(CUDA)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=CUDA)

    def expected(self, row: int, query: Tensor, window: int | None) -> Tensor:
        key, value = self.dense[row].double().repeat_interleave(query.shape[1] // self.planes.shape[3], dim=2)
        scores = torch.einsum("qhd,khd->hqk", query.double(), key) * query.shape[2] ** -0.5
        behind = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))
        hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
        probs = scores.masked_fill(hidden.to(CUDA), -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", probs, value)


@pytest.mark.parametrize(
    ("dtype", "dim", "page_size", "window"),
    [
        (torch.bfloat16, 128, 16, None),
        (torch.bfloat16, 128, 1, 100),
        (torch.bfloat16, 64, 64, None),
        (torch.float16, 64, 16, 100),
        (torch.bfloat16, 80, 16, None),
        (torch.bfloat16, 112, 16, 100),
        (torch.float32, 16, 16, None),
        (torch.float32, 128, 16, None),
    ],
)
def test_attention(dtype: torch.dtype, dim: int, page_size: int, window: int | None) -> None:
    heads, kv_heads = 8, 2
    cache = Cache([1, 63, 700, 2000, 130], page_size, kv_heads, dim, dtype)
    query = normal(5, heads, dim, dtype=dtype)
    key, value = cache.planes
    args = query, key, value, cache.page_table, cache.lengths, 4096, window, dim**-0.5
    for out in (
        decode_attention(*args),
        *(decode_triton(*args, division=Division(splits, 64, 2)) for splits in (1, 3, 30)),
    ):
        for row in range(5):
            close(out[row : row + 1], cache.expected(row, query[row : row + 1], window))
    query_lens = [1, 63, 600, 900, 0]
    query = normal(sum(query_lens) + 150, heads, dim, dtype=dtype)
    query[-150:] = torch.nan
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tail = starts.to(CUDA), cache.lengths, window, dim**-0.5
    out = extend_attention(query, *cache.planes, cache.page_table, *tail)
    for row, part in enumerate(out[:-150].split(query_lens)):
        if query_lens[row]:
            close(part, cache.expected(row, query[starts[row] : starts[row + 1]], window))
    assert not out[-150:].any()


def tree_masks(batch: int, nodes: int, new: int) -> Tensor:
    """Return random trees of `nodes` slots, of which the last `new` are rows: [batch, new, nodes]."""
    mask = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    for row in mask:
        for node in range(1, nodes):
            row[node] |= row[int(torch.randint(node, (1,)))]
    return mask[:, nodes - new :].to(CUDA)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "page_size", "window", "new", "width"),
    [
        (torch.bfloat16, 32, 8, 128, 16, None, 1, 1),
        (torch.bfloat16, 32, 8, 128, 16, None, 4, 4),
        (torch.bfloat16, 32, 8, 128, 16, None, 8, 24),
        (torch.bfloat16, 32, 8, 128, 1, 100, 60, 60),
        (torch.bfloat16, 14, 2, 64, 64, None, 4, 4),
        (torch.bfloat16, 32, 8, 80, 16, None, 4, 4),
        (torch.bfloat16, 32, 8, 112, 16, 100, 8, 24),
        (torch.float16, 8, 8, 64, 16, 3, 8, 24),
        (torch.float32, 4, 2, 16, 16, None, 4, 4),
        (torch.float32, 8, 2, 128, 16, 100, 8, 8),
    ],
)
def test_verify_attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    window: int | None,
    new: int,
    width: int,
) -> None:
    """Any split gives the reference's rows although unused slots hold NaN; a padding row gives zeros."""
    lengths = [width, 63 + width, 700, 2000, 130]
    cache, masks = Cache(lengths, page_size, kv_heads, dim, dtype), tree_masks(6, width, new)
    query = normal(6 * new, heads, dim, dtype=dtype)
    query[-new:] = torch.nan
    tail = 2048, window, dim**-0.5
    exact = query[:-new].double(), *cache.planes.double(), cache.page_table, cache.lengths, masks[:-1]
    expected = verify_reference(*exact, *tail)
    table = torch.cat((cache.page_table, torch.full_like(cache.page_table[:1], BAD_PAGE)))
    padded = torch.cat((cache.lengths, torch.zeros_like(cache.lengths[:1])))
    key, value = cache.planes
    args = query, key, value, table, padded, masks, *tail
    for out in (
        verify_attention(*args),
        *(verify_triton(*args, division=Division(splits, 64, 2)) for splits in (1, 3, 7)),
    ):
        close(out[:-new], expected)
        assert not out[-new:].any()


def test_sampling_draws_the_tokens_of_the_reference() -> None:
    rows, vocab = 64, 128256
    logits = 3 * torch.randn(rows, vocab, device=CUDA)
    temperature = torch.rand(rows, device=CUDA) + 0.5
    temperature[::4] = 0.0
    seed = torch.randint(-(2**62), 2**62, (rows,), device=CUDA)
    position = torch.randint(0, 1 << 34, (rows,), device=CUDA)
    for floor in (None, 2 * torch.rand(rows, device=CUDA)):
        tokens, invalid = sample_tokens(logits, temperature, seed, position, floor, False)
        expected, _ = sample_tokens_reference(logits, temperature, seed, position, floor, False)
        assert not invalid.any()
        assert torch.equal(tokens[::4], expected[::4])
        assert int((tokens != expected).sum()) <= 1  # two perturbed logits closer than the logarithm's error
    assert torch.equal(sample_tokens(logits, temperature, seed, position, None, True)[0], logits.argmax(-1))
    logits[3, 77], logits[5] = torch.nan, -torch.inf
    tokens, invalid = sample_tokens(logits, temperature, seed, position, None, False)
    assert invalid.nonzero()[:, 0].tolist() == [3, 5]
    assert ((tokens >= 0) & (tokens < vocab)).all()


def test_a_graph_serves_other_lengths_than_it_was_captured_with() -> None:
    """Grid and splits come only from host bounds; nothing synchronises during capture."""
    cache = Cache([700, 64], 16, 2, 128, torch.bfloat16)
    query, lengths = normal(2, 8, 128, dtype=torch.bfloat16), torch.ones_like(cache.lengths)

    def run() -> tuple[Tensor, Tensor]:
        rest = cache.page_table, lengths, 8192, None, 128**-0.5
        mask = torch.ones(2, 1, 1, dtype=torch.bool, device=CUDA)
        tree = verify_attention(query, *cache.planes, cache.page_table, lengths, mask, *rest[2:])
        return decode_attention(query, *cache.planes, *rest), tree

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    lengths.copy_(cache.lengths)
    graph.replay()
    for out in outputs:
        for row in range(2):
            close(out[row : row + 1], cache.expected(row, query[row : row + 1], None))


def test_the_filters_keep_what_sorting_keeps() -> None:
    rows, vocab = 32, 128256
    logits = 3 * torch.randn(rows, vocab, device=CUDA)
    logits[3] = logits[3].round()
    temperature = torch.rand(rows, device=CUDA) + 0.5
    top_k = torch.randint(0, 1000, (rows,), dtype=torch.int32, device=CUDA)
    top_p = torch.rand(rows, device=CUDA)
    min_p = 0.02 * torch.rand(rows, device=CUDA)
    top_k[::3], top_p[1::3], min_p[::2] = 0, 1.0, 0.0
    args = logits, temperature, top_k, top_p, min_p
    kept, wanted = (run(*args)[:, None] <= logits for run in (filter_floor, filter_floor_reference))
    # the mass is summed in another order: the last token of a nucleus may differ, among very many in a flat row
    assert ((kept.sum(-1) - wanted.sum(-1)).abs() <= 1 + wanted.sum(-1) // 1000).all()
    assert torch.equal(kept[1::3], wanted[1::3])


@pytest.mark.parametrize("vocab", [151_936, 128_256, 704, 50_257])
def test_masks_equal_the_reference(vocab: int) -> None:
    logits = 3 * torch.randn(24, vocab, device=CUDA)
    logits[7, 5] = torch.nan
    words = torch.randint(-(2**31), 2**31, (9, -(-vocab // 32)), device=CUDA).to(torch.int32)
    owner = torch.randint(-1, 9, (24,), device=CUDA)
    masked, wanted = logits.clone(), logits.clone()
    mask_logits(masked, words, owner)
    mask_logits_reference(wanted, words, owner)
    assert torch.equal(masked.nan_to_num(9.0, neginf=-9e9), wanted.nan_to_num(9.0, neginf=-9e9))
    assert torch.equal(masked[owner < 0].nan_to_num(9.0), logits[owner < 0].nan_to_num(9.0))
    assert torch.isneginf(masked[owner >= 0]).any(-1).all()


@pytest.mark.parametrize("width", [0, 1, 7])
def test_penalties_equal_the_reference_bit_for_bit(width: int) -> None:
    """A token counts the same on a path as in the table: speculation sees plain decoding's logits."""
    rows, vocab = 24, 128256
    logits = 3 * torch.randn(rows, vocab, device=CUDA)
    seen = torch.randint(0, 7, (9, vocab), dtype=torch.int32, device=CUDA)
    owner = torch.randint(0, 9, (rows,), device=CUDA)
    factors = torch.rand(9, device=CUDA) + 0.5, torch.randn(9, device=CUDA), torch.randn(9, device=CUDA)
    path = torch.randint(-1, 50, (rows, width), device=CUDA)
    found = penalise(logits, seen, owner, *factors, path)
    assert torch.equal(found, penalise_reference(logits, seen, owner, *factors, path))
    own = seen.index_select(0, owner)  # a row of the table for each row of logits
    own.scatter_add_(1, path.clamp(min=0), 2 * (path >= 0).int())
    each = [factor.index_select(0, owner) for factor in factors]
    alone = torch.arange(rows, device=CUDA)
    assert torch.equal(found, penalise(logits, own, alone, *each, path[:, :0].contiguous()))


@pytest.mark.parametrize("live", [1536, 1400, 700])
def test_a_whole_prompt_gives_the_same_without_pages(live: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live rows agree with the paged kernel; padding with NaN affects no other row and comes out as zero.

    A Hopper GPU would read pages for both.
    """
    monkeypatch.setattr(prompt_attention, "hopper_reads", lambda *_: False)
    rows, heads, kv_heads, dim = 1536, 8, 2, 128
    pool = plain_pool(1, kv_heads, dim, 16, rows // 16 + 1, torch.bfloat16, CUDA)
    positions = torch.arange(rows, device=CUDA)
    slots = torch.where(positions < live, positions + 16, 0)
    batch = ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=positions,
        positions=positions,
        kv_slots=slots,
        page_table=(torch.arange(rows // 16, device=CUDA) + 1).int()[None],
        seq_lens=torch.tensor([live], dtype=torch.int32, device=CUDA),
        query_start=torch.tensor([0, live], dtype=torch.int32, device=CUDA),
        logits_rows=positions[:0],
        max_seq_len=live,
        query_lens_host=(live,),
        seq_lens_host=(live,),
    )
    merged = normal(rows, heads + 2 * kv_heads, dim, dtype=torch.bfloat16)
    merged[live:] = torch.nan
    inv_freq = 10000.0 ** (-torch.arange(0, dim, 2, device=CUDA) / dim)
    angles = rotary_angles(positions, inv_freq, 1.0, torch.bfloat16)
    results = []
    for tokens in ((), (rows,)):
        attention, qkv = PromptAttention(pool, [None], tokens), merged.clone()
        attention.plan(batch)
        attention.store(0, qkv, angles, None, None, 0.0)
        query, key, value = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        out = attention.forward(0, query, key, value)
        assert out.is_contiguous()
        results.append(out)
    torch.testing.assert_close(results[1], results[0], atol=1.6e-2, rtol=1.6e-2)
    assert not results[1][live:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [30, 4096])
def test_keep_hidden(dtype: torch.dtype, size: int) -> None:
    """Row E3: compares the compiled pool writer with its reference; requests without rows keep their hidden states."""
    hidden, pool = normal(64, size, dtype=dtype), normal(34, 2, size, dtype=dtype)
    rows = torch.randperm(33, device=CUDA)[:16] + 1
    starts, lens = torch.arange(16, device=CUDA) * 4, torch.arange(16, device=CUDA) % 6 - 1
    expected = pool.clone()
    keep_hidden(hidden, rows, pool, 1, lens, starts)
    keep_hidden_reference(hidden, rows, expected, 1, lens, starts)
    assert torch.equal(pool, expected)
