"""Static inputs: nothing stale, nothing of the wrong form, nothing dropped."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from common.engine.graphs.slots import ROW0, Fill, Slot, SlotError, StaticInputs
from common.engine.graphs.spec import Axis, ShapeKey

LARGEST = ShapeKey(12, 4)


@dataclass
class Batch:
    hidden: Tensor | None = None
    ids: Tensor | None = None
    rows: Tensor | None = None


def slots() -> list[Slot[Batch]]:
    return [
        Slot("hidden", Axis.TOKEN, (3,), torch.float32, lambda b: b.hidden),
        Slot("ids", Axis.TOKEN, (), torch.int64, lambda b: b.ids, Fill(7)),
        Slot("rows", Axis.REQUEST, (), torch.int64, lambda b: b.rows, ROW0, poison="keep"),
    ]


def batch(tokens: int, requests: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randn(tokens, 3, generator=generator),
        torch.randint(100, (tokens,), generator=generator),
        torch.arange(1, requests + 1),
    )


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4)), min_size=1, max_size=6))
def test_every_row_past_the_live_ones_is_reset_on_every_load(sizes: list[tuple[int, int]]) -> None:
    """Every field must be reset, after growing, shrinking and changing buckets."""
    inputs = StaticInputs(slots(), LARGEST, "cpu")
    for seed, (tokens, requests) in enumerate(sizes):
        live, shape = ShapeKey(tokens, requests), ShapeKey(-(-tokens // 4) * 4, 4)
        given_batch = batch(tokens, requests, seed)
        views = inputs.load(given_batch, live, shape)
        assert set(views) == {"hidden", "ids", "rows"}
        for name, pad in (("hidden", 0), ("ids", 7), ("rows", 0)):
            count = len(getattr(given_batch, name))
            assert torch.equal(views[name][:count], getattr(given_batch, name))
            assert (views[name][count:] == pad).all()
            assert len(views[name]) == (4 if name == "rows" else shape.tokens)


def test_addresses_never_change() -> None:
    inputs = StaticInputs(slots(), LARGEST, "cpu")
    idle = inputs.idle(ShapeKey(8, 2))
    loaded = inputs.load(batch(5, 1), ShapeKey(5, 1), ShapeKey(8, 2))
    assert {name: view.data_ptr() for name, view in idle.items()} == {
        n: v.data_ptr() for n, v in loaded.items()
    }


def test_a_graph_is_captured_on_padding_only() -> None:
    """Whatever ran before, a later capture or a trial starts with the content of an idle batch."""
    inputs = StaticInputs(slots(), LARGEST, "cpu")
    inputs.load(batch(12, 4), LARGEST, LARGEST)
    idle = inputs.idle(ShapeKey(8, 2))
    assert {name: set(view.flatten().tolist()) for name, view in idle.items()} == {
        "hidden": {0.0},
        "ids": {7},
        "rows": {0},
    }


def test_poison_fills_padding_with_what_shows_and_keeps_contracts() -> None:
    inputs = StaticInputs(slots(), LARGEST, "cpu", poisoned=True)
    views = inputs.load(batch(5, 1), ShapeKey(5, 1), ShapeKey(8, 2))
    assert views["hidden"][5:].isnan().all()
    assert (views["ids"][5:] == torch.iinfo(torch.int64).max).all()
    assert (views["rows"][1:] == 0).all()
    assert views["hidden"][:5].isfinite().all()
    mask = StaticInputs(
        [Slot("mask", Axis.TOKEN, (2,), torch.bool, lambda b: b, poison=Fill(1))],
        LARGEST,
        "cpu",
        poisoned=True,
    )
    assert mask.load(torch.zeros(1, 2, dtype=torch.bool), ShapeKey(1), ShapeKey(3))["mask"][1:].all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden": None}, "slot 'hidden'.*has none; let its source compute it"),
        ({"hidden": torch.zeros(5, 4)}, r"found \(5, 4\), declared \(5, 3\).*same function"),
        ({"hidden": torch.zeros(6, 3)}, r"found \(6, 3\), declared \(5, 3\)"),
        ({"hidden": torch.zeros(5, 3, dtype=torch.float16)}, "float16.*declared torch.float32.*convert"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(change: dict[str, Tensor | None], text: str) -> None:
    """A different width raises; another system silently replays stale hidden states."""
    inputs = StaticInputs(slots(), LARGEST, "cpu")
    wrong = batch(5, 1)
    for name, value in change.items():
        setattr(wrong, name, value)
    for load in (
        lambda: inputs.load(wrong, ShapeKey(5, 1), ShapeKey(8, 2)),
        lambda: inputs.live(wrong, ShapeKey(5, 1)),
    ):
        with pytest.raises(SlotError, match=text):
            load()


def test_slot_names_are_unique() -> None:
    with pytest.raises(ValueError, match="share a name"):
        StaticInputs([*slots(), *slots()], LARGEST, "cpu")
