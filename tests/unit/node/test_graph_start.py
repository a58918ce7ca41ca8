"""Graphs at a node's start: a trial determines the pool; lack of memory is reported with the calculation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count

import pytest
import torch

from common.engine.forward.batch import CaptureHiddenMode
from common.engine.graphs import node_graphs
from common.engine.graphs.backends.tape import TapeRecorder
from common.engine.graphs.node_graphs import GRAPH_BYTES, NodeGraphs
from common.engine.graphs.report import node_table
from common.engine.graphs.rules import PhaseSwitch
from common.engine.host_memory import GIB
from common.engine.layers.placement import Placement
from common.errors import ConfigError
from common.kv_cache.pool_spec import pool_spec
from common.node import graph_start, memory
from common.node.memory import MemoryPlan
from common.node.serving_model import TRIAL_PAGES, NodeMemory, ServingModel
from common.node_plan import PoolBudget
from common.observability.logs import Log
from prefill_node.graphs import prompt_graphs
from prefill_node.graphs.prefill_extend import PrefillExtend
from tests.fakes.tiny_model import CONFIG, MAX_LEN, tiny_model
from tests.unit.engine.graphs.rig import DeviceDriver, model, sequences

FULL = CaptureHiddenMode.FULL
PAGE = 16
TOKENS = 64 * PAGE
GPU = Placement(torch.float32, torch.device("cuda", 0))  # only a name: nothing is allocated on it


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Fake a GPU of 16 GiB: set its free memory, and how much more is in use at each query."""
    state = {"free": 8 * GIB, "step": GIB // 2}
    reserved = count()
    monkeypatch.setattr(memory, "RELEASE_SECONDS", 0.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (state["free"], 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: next(reserved) * state["step"])
    return state


def served(tokens: int | None, placement: Placement = GPU) -> ServingModel:
    budget = PoolBudget(tokens, 0.5, "prefill")
    plan = MemoryPlan(weights=GIB, pool=0)
    return ServingModel(
        tiny_model(),
        CONFIG,
        placement,
        "f",
        pool_spec(CONFIG, None, PAGE, "float32"),
        TRIAL_PAGES,
        min(MAX_LEN, TOKENS),
        NodeMemory(budget, plan),
    )


def build() -> list[NodeGraphs[PrefillExtend]]:
    """Build four graphs on the tape backend."""
    driver = DeviceDriver(model(), sequences([9]), 4)
    return [
        prompt_graphs.prefill_graphs(driver.runner, PhaseSwitch("breakable"), 8, 8, CaptureHiddenMode.NULL)
    ]


@pytest.mark.parametrize("tokens", [TOKENS, None])
def test_every_gpu_node_measures_its_graphs(tokens: int | None, free: dict[str, int]) -> None:
    """This holds even if the config sets the size of the pool; a trial reads the free memory four times."""
    ready = graph_start.sized(served(tokens), build)
    graphs = 3 * free["step"] + 2 * free["step"] + 4 * GRAPH_BYTES  # the two shapes beyond those of the trial
    assert ready.memory.plan.graphs == graphs
    if tokens is None:
        assert ready.num_pages == (8 * GIB - ready.memory.plan.total) // ready.spec.page_bytes
    else:
        assert ready.num_pages == tokens // PAGE + 1


@pytest.mark.parametrize("unbroken", [0, 2, 4, 8])
def test_the_trial_measures_graphs_with_and_without_breaks(
    unbroken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller graphs without breaks may take more than larger ones, whose attention allocates at each replay."""
    monkeypatch.setattr(prompt_graphs, "UNBROKEN_TOKENS", unbroken)
    nodes = build()

    def reserved() -> int:
        return GIB if any(row.requests for row in nodes[0].forward.graphs.rows) else 0

    assert node_graphs.trial(lambda: nodes, reserved) == (GIB if unbroken else 0) + 4 * GRAPH_BYTES


def test_a_pool_that_its_graphs_leave_no_room_for_is_refused(free: dict[str, int]) -> None:
    """The pool would fit without graphs, but then the largest buckets would run eagerly."""
    free |= {"step": GIB, "free": 4 * GIB}
    with pytest.raises(ConfigError) as caught:
        graph_start.sized(served(TOKENS), build)
    text = str(caught.value)
    assert text.startswith(
        "prefill.pool_tokens: does not fit on cuda:0: weights 1.00 GiB + KV pool 0.00 GiB + "
    )
    assert (
        "+ graphs 5.02 GiB + room to work 2.00 GiB + sampling state 0.00 GiB = 8.02 GiB, 4.00 GiB of" in text
    )
    assert "16.00 GiB are free, 4.00 GiB its own; the node leaves no room for a pool" in text


def test_on_a_cpu_there_is_nothing_to_measure() -> None:
    def never() -> Iterator[NodeGraphs[PrefillExtend]]:
        raise AssertionError("built for a trial")

    given = served(TOKENS, Placement(torch.float32, torch.device("cpu")))
    assert graph_start.sized(given, never) is given


def _full(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")


@pytest.mark.usefixtures("free")
def test_graphs_that_fit_beside_no_pool_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails for lack of memory uses none, so a trial that continued would measure nothing."""
    monkeypatch.setattr(TapeRecorder, "begin", _full)
    with pytest.raises(ConfigError) as caught:
        graph_start.sized(served(TOKENS), build)
    assert str(caught.value) == (
        "prefill.graphs: the graphs do not fit even without a pool, on cuda:0: prefill of 8 tokens: OutOfMemoryError: "
        "CUDA out of memory. Tried to allocate 20.00 MiB. Memory plan: weights 1.00 GiB + KV pool 0.00 GiB + graphs "
        "not measured yet + room to work 2.00 GiB + sampling state 0.00 GiB = 3.00 GiB. Lower prefill.chunk_tokens "
        "or max_batch, write prefill.graphs: none, or use a larger GPU"
    )


def test_what_runs_neither_under_a_graph_nor_without_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = build()
    monkeypatch.setattr(TapeRecorder, "begin", _full)
    monkeypatch.setattr(graphs[0].forward.graphs.program, "run", _full)
    with pytest.raises(
        ConfigError, match=r"prefill\.graphs: prefill runs neither under a graph nor .* 20.00 MiB"
    ):
        graph_start.capture(served(TOKENS), graphs, Log("test"))


def test_each_node_logs_one_table(caplog: pytest.LogCaptureFixture) -> None:
    """The table has phase, backend, shapes, hidden mode, memory and seconds of capture, and why anything is off."""
    graphs = build()
    runner = DeviceDriver(model(), sequences([9]), 4).runner
    off = prompt_graphs.prefill_graphs(runner, PhaseSwitch("none"), 8, 8, FULL)
    with caplog.at_level("INFO", "tandem.test"):
        graph_start.capture(served(TOKENS), [*graphs, off], Log("test"))
    lines = [record.fields["table"] for record in caplog.records]  # type: ignore[attr-defined]
    assert {record.getMessage() for record in caplog.records} == {"graphs"}
    assert lines[0].split() == [
        "phase",
        "model",
        "backend",
        "shapes",
        "hidden",
        "graphs",
        "s",
        "MiB",
        "state",
    ]
    rows = [node_graphs.report(each) for each in (*graphs, off)]
    assert lines == node_table(rows)
    assert lines[1].split()[:9] == ["prefill", "target", "breakable", "1", "2", "4", "8", "tokens", "NULL"]
    assert re.search(r"  always eager +FULL +0 +0\.00 +0\.0 +prefill\.graphs is none$", lines[2])


def test_a_failed_graph_is_reported_with_its_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason appears in the log at once, in the table and in /server_info, for each shape."""
    begin, begun = TapeRecorder.begin, count()
    failing = range(2, 6)  # two attempts at each of two shapes, after the two segments of the first
    monkeypatch.setattr(
        TapeRecorder, "begin", lambda self: _full() if next(begun) in failing else begin(self)
    )
    graphs = build()
    with caplog.at_level("INFO", "tandem.test"):
        graph_start.capture(served(TOKENS), graphs, Log("test"))
    reason = "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."
    told = node_graphs.report(graphs[0])
    assert (told.captured, told.failed) == (2, {"4": reason, "2": reason})
    warned, *table = caplog.records
    assert (warned.levelname, warned.fields["failed"]) == ("WARNING", told.failed)  # type: ignore[attr-defined]
    assert table[1].fields["table"].endswith(f"  eager: 4, 2: {reason}")  # type: ignore[attr-defined]
