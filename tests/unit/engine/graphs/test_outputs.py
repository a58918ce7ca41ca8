"""Outputs of graphs: every field declared, narrowed, and cloned where it is kept."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from common.engine.graphs.outputs import OutField, OutputError, OutputSpec, map_tensors
from common.engine.graphs.spec import Axis, ShapeKey
from common.engine.models.causal_lm import BodyOutput
from decode_node.graphs import decode_graph
from prefill_node.graphs import prefill_extend


@dataclass
class Result:
    logits: Tensor
    hidden: Tensor | None = None


DECLARED = {
    "logits": OutField(Axis.REQUEST, kept=True),
    "hidden": OutField(Axis.TOKEN),
}


def test_a_field_that_is_not_declared_fails_at_construction() -> None:
    """Row C3's general rule: rebuilding an output copies every field or fails loudly."""
    OutputSpec(Result, DECLARED)
    grown = make_dataclass("Grown", [("mm_input_embeds", Tensor)], bases=(Result,), kw_only=True)
    with pytest.raises(OutputError, match=r"Grown\.mm_input_embeds: not declared; add its axis"):
        OutputSpec(grown, DECLARED)
    with pytest.raises(OutputError, match="no field gone"):
        OutputSpec(Result, {**DECLARED, "gone": OutField(Axis.TOKEN)})
    with pytest.raises(OutputError, match="neither"):
        OutputSpec(dict, {})


def test_the_outputs_of_our_graphs_are_declared_whole() -> None:
    """Row C3 for the types that graphs return; a new field already fails at import."""
    assert set(BodyOutput._fields) == set(prefill_extend.OUTPUTS.declared)
    assert set(decode_graph.DecodeResult.__dataclass_fields__) == set(decode_graph.OUTPUTS.declared)


def test_each_field_is_narrowed_to_the_live_rows_of_its_axis() -> None:
    """Rows C1, C2, C3: padding is removed from per-token fields, and None stays None."""
    captured, live = ShapeKey(8, 4), ShapeKey(5, 3)
    full = Result(torch.arange(4.0), torch.arange(16.0).view(8, 2))
    narrowed = OutputSpec(Result, DECLARED).narrow(full, captured, live)
    assert narrowed.logits.tolist() == [0, 1, 2]
    assert narrowed.hidden is not None
    assert narrowed.hidden.shape == (5, 2)
    assert OutputSpec(Result, DECLARED).narrow(Result(torch.zeros(4)), captured, live).hidden is None


def test_kept_fields_outlive_the_next_replay_and_others_are_views() -> None:
    full = Result(torch.zeros(4), torch.zeros(8, 2))
    narrowed = OutputSpec(Result, DECLARED).narrow(full, ShapeKey(8, 4), ShapeKey(8, 4))
    full.logits.fill_(1)
    assert full.hidden is not None
    full.hidden.fill_(1)
    assert narrowed.logits.sum() == 0
    assert narrowed.hidden is not None
    assert narrowed.hidden.sum() == 16


def test_rows_that_are_not_of_the_declared_axis_are_refused() -> None:
    """Logits per request must not be narrowed by a number of tokens."""
    with pytest.raises(OutputError, match="hidden: 4 rows, declared one per token of 8"):
        OutputSpec(Result, DECLARED).narrow(
            Result(torch.zeros(4), torch.zeros(4, 2)), ShapeKey(8, 4), ShapeKey(5, 3)
        )
    with pytest.raises(OutputError, match="int; graphs return tensors"):
        OutputSpec(Result, DECLARED).narrow(Result(3), ShapeKey(8, 4), ShapeKey(5, 3))  # type: ignore[arg-type]


def test_map_tensors_reaches_every_form_of_output() -> None:
    class Pair(NamedTuple):
        a: Tensor
        b: Tensor | None

    one = torch.ones(1)
    changed = map_tensors((one, Pair(one, None), Result(one)), lambda t: t + 1)
    assert isinstance(changed[1], Pair)
    assert changed[1].b is None
    assert isinstance(changed[2], Result)
    assert [t.item() for t in (changed[0], changed[1].a, changed[2].logits)] == [2, 2, 2]
