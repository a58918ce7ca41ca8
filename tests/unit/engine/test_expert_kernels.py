"""Kernels of experts against their torch references, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.attention.backend import TokenSlots
from common.engine.formats import dense_experts
from common.engine.formats.dense import DenseFormat
from common.engine.layers import norm as norm_layer
from common.engine.layers import router
from common.engine.layers.activations import Activations
from common.engine.layers.experts import Experts
from common.engine.layers.norm import RmsNorm
from common.engine.ops import expert_weights
from common.engine.ops.expert_products import (
    expert_parts_reference,
    expert_parts_triton,
    few_pairs_triton,
)
from common.engine.ops.expert_tiles import (
    COLUMNS,
    FEW,
    FEW_TOKENS,
    NARROW,
    ExpertTiles,
    choose_few,
    choose_many,
)
from common.engine.ops.group_pairs import group_pairs_reference, group_pairs_triton
from common.engine.ops.grouped_products import grouped_product_triton
from common.engine.ops.route import route_reference, route_triton
from common.engine.ops.shared_memory import H200
from common.engine.ops.sum_parts import (
    sum_parts_reference,
    sum_parts_rms_norm_reference,
    sum_parts_rms_norm_triton,
    sum_parts_triton,
)
from common.engine.ops.triton_kernel import tl
from tests.fakes.tiny_model import MIXTURE, PLACEMENT

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]
DTYPES = [torch.float32, torch.float16]
SOFTMAX = (False, 1, 1, True, 0.0, 1.0)
# sigmoid, groups, kept groups, normalised, epsilon, scaling
RULES = {
    "softmax": SOFTMAX,
    "softmax-as-is": (False, 1, 1, False, 0.0, 1.0),
    "sigmoid": (True, 1, 1, True, 1e-20, 2.5),
    "sigmoid-groups": (True, 4, 2, True, 1e-20, 1.5),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "shared", "gate"),
    [(1, 20, 1, 0, False), (5, 12, 6, 1, True), (3, 64, 8, 2, False)],
)
def test_route(
    rule: str, dtype: torch.dtype, tokens: int, experts: int, chosen: int, shared: int, gate: bool
) -> None:
    x, rows = torch.randn(tokens, 40, dtype=dtype), torch.randn(experts + gate, 40, dtype=dtype)
    correction = torch.randn(experts) if rule.startswith("sigmoid") else None
    given = (x, rows, correction, None, 0, chosen, shared, gate, *RULES[rule])
    expected, found = route_reference(*given), route_triton(*given)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)


def test_the_correction_counts_for_the_choice_only() -> None:
    x, rows = torch.randn(4, 8), torch.randn(6, 8)
    correction = torch.tensor([0.0, 9.0, 0.0, 0.0, 8.0, 0.0])
    for run in (route_reference, route_triton):
        experts, shares = run(x, rows, correction, None, 0, 2, 0, False, True, 1, 1, False, 0.0, 1.0)
        assert experts.tolist() == [[1, 4]] * 4
        torch.testing.assert_close(shares, (x @ rows.T).sigmoid()[:, [1, 4]])


def test_equal_scores_choose_the_first_experts() -> None:
    experts, shares = route_triton(torch.zeros(2, 8), torch.randn(5, 8), None, None, 0, 3, 0, False, *SOFTMAX)
    assert experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(shares, torch.full((2, 3), 1 / 3))


def test_rows_with_nan_choose_experts_that_exist() -> None:
    x = torch.randn(3, 8)
    x[1] = torch.nan
    for rule in RULES.values():
        experts, _ = route_triton(x, torch.randn(12, 8), None, None, 0, 5, 0, False, *rule)
        assert all(len(set(row)) == 5 and min(row) >= 0 and max(row) < 12 for row in experts.tolist())


@pytest.mark.parametrize("value", [-torch.inf, -3e38, torch.inf, torch.nan])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_broken_correction_chooses_different_experts(value: float, groups: int) -> None:
    """An expert twice in one row makes the products read and write outside of their tensors."""
    correction = torch.full((12,), value)
    correction[5] = 0.0
    given = (torch.randn(3, 8), torch.randn(12, 8), correction, None, 0)
    experts, _ = route_triton(*given, 5, 0, False, True, groups, 2 if groups > 1 else 1, True, 1e-20, 1.0)
    assert all(len(set(row)) == 5 and min(row) >= 0 and max(row) < 12 for row in experts.tolist())


def test_no_rows_choose_nothing() -> None:
    experts, shares = route_triton(torch.zeros(0, 8), torch.randn(5, 8), None, None, 0, 3, 1, False, *SOFTMAX)
    assert experts.shape == shares.shape == (0, 4)


def test_padding_rows_choose_nothing() -> None:
    """Rows in page 0, and rows past the last slot; what they hold does not matter."""
    x, rows, slots = torch.randn(5, 8), torch.randn(6, 8), torch.tensor([16, 3, 40, 15])
    x[[1, 4]] = torch.nan
    for run in (route_reference, route_triton):
        experts, _ = run(x, rows, None, slots, 16, 2, 1, False, *SOFTMAX)
        assert experts.dtype == torch.int32
        assert (
            (experts < 0).all(1).tolist() == (experts < 0).any(1).tolist() == [False, True, False, True, True]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 8, 100), (1, 1, 7), (0, 3, 16), (2, 5, 1500)])
def test_sum_parts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A row without experts gives zeros, whatever its parts hold."""
    parts, experts = torch.randn(shape, dtype=dtype), torch.zeros(shape[:2], dtype=torch.int32)
    experts[1:2], parts[1:2] = -1, torch.nan
    found = sum_parts_triton(parts, experts)
    assert torch.equal(found, sum_parts_reference(parts, experts))
    assert not found[1:2].any()
    residual = torch.randn(shape[0], shape[2], dtype=dtype)
    for weight in (torch.randn(shape[2], dtype=dtype), torch.randn(shape[2])):
        given = (parts, experts, residual, weight, 1e-5)
        normed, total = sum_parts_rms_norm_triton(*given)
        expected, expected_total = sum_parts_rms_norm_reference(*given)
        assert torch.equal(total, expected_total)
        limit = 2e-3 if dtype == torch.float16 else 2e-6
        torch.testing.assert_close(normed, expected, atol=limit, rtol=limit)


@pytest.mark.parametrize(("rows", "extra"), [(16, 0), (64, 16)])
@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("total", [1, 130, 600])
def test_group_pairs(total: int, count: int, rows: int, extra: int) -> None:
    """Pairs without an expert are in no group; some experts have no pairs; pairs of one block and of several."""
    experts = torch.randint(-1, max(count - 1, 1), (total,), dtype=torch.int32)
    expected = group_pairs_reference(experts, count, rows, extra)
    found = group_pairs_triton(experts, count, rows, extra)
    listed = int((experts >= 0).sum())
    assert torch.equal(found.pairs[:listed], expected.pairs[:listed])
    assert torch.equal(found.tiles, expected.tiles)
    # Every pair with an expert is in one tile, with pairs of the same expert.
    covered = []
    for expert, first, pairs in expected.tiles.tolist():
        assert pairs <= rows + extra
        mine = expected.pairs[first : first + pairs]
        assert (experts[mine] == expert).all()
        covered += mine.tolist()
    assert sorted(covered) == torch.nonzero(experts >= 0).flatten().tolist()


def choices(tokens: int, experts: int, chosen: int, kind: str) -> Tensor:
    """[tokens, chosen] int32 different experts per token."""
    if kind == "same":
        found = torch.arange(chosen).expand(tokens, -1)
    else:
        found = torch.rand(tokens, experts).topk(chosen).indices
    found = found.to(torch.int32).contiguous()
    if kind == "padded":
        found[tokens // 2 :] = -1
    return found


FEW_ROWS = ("few", ExpertTiles(16, 32, 16, 4, 2))
JOINED_ROWS = ("few", ExpertTiles(16, 32, 16, 4, 2, joined=True))
MORE_JOINED_ROWS = ("few", ExpertTiles(32, 32, 32, 4, 2, joined=True))
MORE_ROWS = ("few", ExpertTiles(32, 32, 32, 4, 2))
MANY_ROWS = ("many", ExpertTiles(32, 32, 16, 4, 2))
# Tiles with fewer pairs than the rows of a short product, and with more than the rows of a full one.
WIDE_ROWS = ("many", ExpertTiles(16, 32, 32, 4, 2, short=16, extra=16))


def computed(
    how: tuple[str, ExpertTiles], x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, shares: Tensor
) -> Tensor:
    form, tiles = how
    if form == "few":
        inner = few_pairs_triton(x, gate_up, experts, shares, True, tiles)
        apart = tiles._replace(joined=False)
        return few_pairs_triton(inner, down, experts, shares, False, apart).view(*experts.shape, x.shape[1])
    groups = group_pairs_triton(experts.view(-1), len(gate_up), tiles.rows, tiles.extra)
    inner = grouped_product_triton(x, gate_up, experts, shares, groups, True, tiles)
    out = grouped_product_triton(inner, down, experts, shares, groups, False, tiles)
    return out.view(*experts.shape, x.shape[1])


def stacks(experts: int, hidden: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(experts, 2 * inner, hidden, dtype=dtype) / hidden**0.5
    return gate_up, torch.randn(experts, hidden, inner, dtype=dtype) / inner**0.5


@pytest.mark.parametrize(
    ("how", "bulk", "dtype", "kind", "tokens", "experts", "chosen", "hidden", "inner"),
    [
        (FEW_ROWS, False, torch.float32, "random", 1, 3, 1, 32, 16),
        (FEW_ROWS, False, torch.float16, "random", 7, 5, 3, 40, 24),
        (FEW_ROWS, False, torch.float32, "padded", 7, 5, 3, 40, 24),
        (FEW_ROWS, False, torch.float32, "same", 2, 9, 8, 32, 20),
        (FEW_ROWS, False, torch.float32, "random", 0, 4, 2, 32, 16),
        (JOINED_ROWS, True, torch.float32, "random", 1, 3, 1, 32, 16),
        (JOINED_ROWS, False, torch.float16, "random", 7, 5, 3, 40, 24),
        (JOINED_ROWS, True, torch.float32, "padded", 7, 5, 3, 40, 20),
        # Experts with more tokens than the smallest tile has rows, and with fewer.
        (MORE_JOINED_ROWS, True, torch.float32, "random", 27, 3, 2, 40, 24),
        (MORE_ROWS, True, torch.float32, "random", 27, 3, 2, 40, 24),
        (MORE_ROWS, False, torch.float16, "padded", 19, 5, 2, 40, 24),
        (WIDE_ROWS, True, torch.float32, "random", 1, 3, 1, 32, 16),
        (WIDE_ROWS, True, torch.float32, "same", 40, 9, 8, 32, 20),
        (MANY_ROWS, False, torch.float32, "random", 27, 7, 5, 40, 24),
        (WIDE_ROWS, True, torch.float16, "padded", 27, 7, 5, 40, 24),
        (MANY_ROWS, False, torch.float32, "random", 0, 4, 2, 32, 16),
    ],
)
def test_expert_products(
    how: tuple[str, ExpertTiles],
    bulk: bool,
    dtype: torch.dtype,
    kind: str,
    tokens: int,
    experts: int,
    chosen: int,
    hidden: int,
    inner: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles are read by an address per element, or by bulk copies as on a Hopper GPU."""
    monkeypatch.setattr(expert_weights, "copies_in_bulk", lambda *matrices: bulk)
    x = torch.randn(tokens, hidden, dtype=dtype)
    gate_up, down = stacks(experts, hidden, inner, dtype)
    which, shares = choices(tokens, experts, chosen, kind), torch.rand(tokens, chosen)
    found = computed(how, x, gate_up, down, which, shares)
    expected = expert_parts_reference(x, gate_up, down, which, shares)
    limit = 4e-3 if dtype == torch.float16 else 5e-6
    has = which >= 0
    torch.testing.assert_close(found[has], expected[has], atol=limit, rtol=limit)
    assert not expected[~has].any()


@pytest.mark.parametrize("how", [FEW_ROWS, JOINED_ROWS, MANY_ROWS])
def test_the_result_of_a_token_does_not_depend_on_its_company(how: tuple[str, ExpertTiles]) -> None:
    x, (gate_up, down) = torch.randn(4, 40), stacks(3, 40, 16, torch.float32)
    which, shares = choices(4, 3, 2, "random"), torch.rand(4, 2)
    together = computed(how, x, gate_up, down, which, shares)
    for token in range(4):
        one = slice(token, token + 1)
        assert torch.equal(computed(how, x[one], gate_up, down, which[one], shares[one]), together[one])


def test_an_unused_expert_is_not_read() -> None:
    """Its weights may hold anything, also where a token has no expert."""
    gate_up, down = stacks(4, 32, 16, torch.float32)
    for stack in (gate_up, down):
        stack[[0, 3]] = torch.nan
    x, shares = torch.randn(3, 32), torch.rand(3, 2)
    which = torch.tensor([[1, 2], [-1, -1], [2, -1]], dtype=torch.int32)
    for how in (FEW_ROWS, JOINED_ROWS, MANY_ROWS):
        found = computed(how, x, gate_up, down, which, shares)
        assert not found[which >= 0].isnan().any()


def test_launchers_refuse_another_layout() -> None:
    x, (gate_up, down), which, shares = (
        torch.randn(17, 32),
        stacks(4, 32, 16, torch.float32),
        choices(17, 4, 2, "random"),
        torch.rand(17, 2),
    )
    with pytest.raises(AssertionError, match="17 tokens, a tile has 16"):
        few_pairs_triton(x, gate_up, which, shares, True, FEW_ROWS[1])
    with pytest.raises(AssertionError, match="only gates and up projections"):
        few_pairs_triton(x, gate_up, which, shares, False, MORE_JOINED_ROWS[1])
    for wrong, said in (
        ((x.half(), gate_up, which, shares), "times"),
        ((x, down, which, shares), "the experts take 16"),
        ((x, gate_up, which.long(), shares), "int32"),
        ((x, gate_up, which, shares[:, :1].contiguous()), "one share per expert"),
    ):
        with pytest.raises(AssertionError, match=said):
            few_pairs_triton(*wrong, True, MORE_ROWS[1])


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, H200.shared_bytes])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_fit_the_gpu(shared: int, itemsize: int, gated: bool) -> None:
    """Two programs of few tokens in 16 bits fit on a multiprocessor; all keep at least two steps in flight."""
    for tokens in (1, 5, 16, 17, 64):
        for used in (1, 8, 128):
            few = choose_few(tokens, used, 768, itemsize, gated, 132, shared)
            assert few.rows >= tokens
            assert few.stages >= 2
            assert few.shared_bytes(itemsize, gated) <= shared // (2 if itemsize == 2 else 1)
            assert few.joined == (gated and tokens <= FEW)
            narrow = few.joined or 2 * used * 768 // COLUMNS < 132
            assert few.columns == (NARROW if narrow else COLUMNS)
    for pairs, rows in ((65, 32), (2048, 32), (8192, 64), (1 << 16, 128)):
        many = choose_many(pairs, 128, itemsize, gated, shared)
        assert many.rows == rows
        assert many.shared_bytes(itemsize, gated) <= shared
        other = choose_many(pairs, 128, itemsize, not gated, shared)
        assert (other.rows, other.extra) == (many.rows, many.extra), "both products have the same tiles"


@pytest.mark.parametrize("tokens", [5, FEW_TOKENS + 6])
def test_a_layer_of_kernels_equals_a_layer_of_references(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Router, shared experts and the norm after them, with padding rows, by the tiles that are chosen on a GPU."""
    layer, norm = Experts("layer", MIXTURE, DenseFormat(PLACEMENT)), RmsNorm("norm", 32, 1e-6, PLACEMENT)
    for parameter in (*layer.parameters(), *norm.parameters()):
        parameter.normal_(std=0.3)
    x, stream = torch.randn(2, tokens, MIXTURE.hidden_size)
    given = Activations(x), stream, norm, TokenSlots(torch.arange(tokens) * 5 % 48, 16)
    expected = layer.add_norm(*given)
    monkeypatch.setattr(router, "route", route_triton)
    monkeypatch.setattr(dense_experts, "expert_parts", expert_parts_triton)
    monkeypatch.setattr(norm_layer, "sum_parts_rms_norm", sum_parts_rms_norm_triton)
    found = layer.add_norm(*given)
    torch.testing.assert_close(found[0].tensor(), expected[0].tensor(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-4)
