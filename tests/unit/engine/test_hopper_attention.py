"""Which attention the kernel for Hopper GPUs serves, and how it divides keys; its values are checked on GPUs only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from common.engine.attention.prompt_attention import PromptAttention
from common.engine.graphs.rules import PhaseSwitch
from common.engine.layers.placement import Placement
from common.engine.ops import extend_attention, hopper_attention
from common.engine.ops.extend_attention import extend_triton
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.hopper_attention import hopper_extend, hopper_serves
from common.engine.ops.triton_kernel import HAS_GLUON
from prefill_node.graphs.prompt_graphs import unbroken_tokens
from prefill_node.graphs.static_extend import UNBROKEN_TOKENS
from tests.fakes.pools import plain_pool

BF16 = torch.bfloat16


def query(heads: int = 32, head_dim: int = 128, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(4, heads, head_dim, dtype=dtype)


def plane(page: int = 16, heads: int = 8, head_dim: int = 128, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(3, page, heads, head_dim, dtype=dtype)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_attention, "is_hopper", lambda device: True)


def test_the_locked_triton_has_the_names_that_the_kernel_uses() -> None:
    """Otherwise nothing would fail: Hopper GPUs would take the slower kernel."""
    pytest.importorskip("triton")
    assert HAS_GLUON


def test_other_devices_are_not_served() -> None:
    assert not hopper_serves(query(), plane(), None, (1.0, 1.0))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("queries", "keys", "window", "scales", "served"),
    [
        (query(), plane(), None, (1.0, 1.0), True),
        (query(), plane(8), None, (1.0, 1.0), True),
        (query(), plane(128), None, (1.0, 1.0), True),
        (query(28), plane(heads=4), None, (1.0, 1.0), True),
        (query(16, 256), plane(64, 2, 256), None, (1.0, 1.0), True),
        (query(dtype=torch.float16), plane(dtype=torch.float16), None, (1.0, 1.0), True),
        (query(), plane(), 4096, (1.0, 1.0), False),
        (query(), plane(), None, (0.5, 1.0), False),
        (query(), plane(dtype=torch.float8_e4m3fn), None, (1.0, 1.0), False),
        (query(dtype=torch.float32), plane(dtype=torch.float32), None, (1.0, 1.0), False),
        (query(head_dim=80), plane(head_dim=80), None, (1.0, 1.0), False),
        (query(), plane(4), None, (1.0, 1.0), False),
        (query(), plane(24), None, (1.0, 1.0), False),
        (query(), plane(256), None, (1.0, 1.0), False),
        (query(16, 256), plane(128, 2, 256), None, (1.0, 1.0), False),
        (query(256), plane(heads=1), None, (1.0, 1.0), False),
        (
            torch.zeros(4, 32 * 128 + 4, dtype=BF16)[:, :-4].unflatten(1, (32, 128)),
            plane(),
            None,
            (1.0, 1.0),
            False,
        ),
    ],
)
def test_what_is_served(
    queries: torch.Tensor, keys: torch.Tensor, window: int | None, scales: tuple[float, float], served: bool
) -> None:
    assert hopper_serves(queries, keys, window, scales) is served


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("windows", "dtype", "stored", "tokens"),
    [
        ([None, None], BF16, BF16, 8192),
        ([None, None], BF16, FP8, 8192),
        ([None, 4096], BF16, BF16, 0),
        ([None, 4096], BF16, FP8, 0),
        ([None, None], BF16, torch.float16, 0),
        ([None, None], torch.float32, torch.float32, 0),
    ],
)
def test_graphs_need_no_breaks_where_all_layers_are_served(
    windows: list[int | None], dtype: torch.dtype, stored: torch.dtype, tokens: int
) -> None:
    pool = plain_pool(2, 2, 64, 16, 3, stored, "cpu")
    attention = PromptAttention(pool, windows)
    assert attention.tokens_on_device(8, dtype, 8192) == tokens


def test_graphs_have_breaks_on_other_devices() -> None:
    attention = PromptAttention(plain_pool(1, 2, 64, 16, 3, BF16, "cpu"), [None])
    assert attention.tokens_on_device(8, BF16, 8192) == 0


@pytest.mark.parametrize(
    ("wanted", "on_device", "tokens"),
    [
        ("breakable", 0, UNBROKEN_TOKENS),
        ("breakable", 8192, 8192),
        ("breakable", 256, UNBROKEN_TOKENS),
        ("piecewise", 8192, UNBROKEN_TOKENS),
        ("none", 8192, 0),
    ],
)
def test_graphs_of_so_many_tokens_have_no_breaks(wanted: str, on_device: int, tokens: int) -> None:
    placement = Placement(torch.float32, torch.device("cpu"))
    assert unbroken_tokens(placement, PhaseSwitch(wanted), on_device) == tokens


@pytest.mark.parametrize(
    ("starts", "reason"),
    [
        (torch.zeros(4, dtype=torch.int32)[::2], "starts must be contiguous"),
        (torch.zeros(3, dtype=torch.int32), "starts for 1 requests"),
    ],
)
@pytest.mark.parametrize("launch", [hopper_extend, partial(extend_triton, window=None)])
def test_starts_that_a_kernel_would_misread_are_refused(
    starts: torch.Tensor, reason: str, launch: Callable[..., object]
) -> None:
    lengths = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(AssertionError, match=reason):
        launch(query(), plane(), plane(), lengths[None], starts, lengths, scale=0.1)


@pytest.mark.parametrize("served", [True, False])
def test_extend_attention_asks_whether_it_is_served(served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(extend_attention, "hopper_serves", lambda *given: served)
    monkeypatch.setattr(extend_attention, "hopper_extend", lambda *given: calls.append("hopper"))
    monkeypatch.setattr(extend_attention, "extend_triton", lambda *given: calls.append("triton"))
    lengths = torch.zeros(1, dtype=torch.int32)
    given = query(), plane(), plane(), lengths[None], torch.zeros(2, dtype=torch.int32), lengths
    extend_attention.extend_cuda(*given, None, 0.1)
    assert calls == ["hopper" if served else "triton"]
