"""A node compiles its kernels on all cores before it launches them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from common.engine.graphs.backends.base import CaptureError, Recording
from common.engine.graphs.graph_runner import GraphRunner
from common.engine.graphs.node_graphs import NodeGraphs
from common.engine.graphs.rules import PhaseSwitch
from common.engine.graphs.spec import GraphKey
from common.engine.ops.ended_programs import ended_programs
from common.engine.ops.triton_kernel import compiling_only, launches
from common.engine.state.relay_state import RelayState
from common.node import graph_start
from common.observability.logs import Log
from decode_node.graphs import step_graphs
from decode_node.graphs.decode_graph import VARIANTS, DecodeGraphs
from decode_node.page_table import PageTable
from tests.unit.engine.graphs.rig import model
from tests.unit.engine.paged_driver import Driver

CPU = torch.device("cpu")
REPO = Path(__file__).parents[3]


def test_kernels_compile_and_load_on_threads_and_are_launched_later(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.fakes.compile_ahead"]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == {
        "cached at first": False,
        "launched ahead": [],
        "loaded on": ["compile"],
        "compilations": [0.0, 0.0],
        "launched": ["_rms_norm_kernel", "_silu_mul_kernel"],
        "compilations later": 2,
        "raised": "CompileTimeAssertionFailure",
        "cached again": True,
    }


class DebugLines(Log):
    """Keeps the event and the error of each line."""

    def __init__(self) -> None:
        super().__init__("test")
        self.kept: list[tuple[str, object]] = []

    def debug(self, event: str, **fields: object) -> None:
        self.kept.append((event, fields["error"]))


class FakeKernels:
    """Takes the place of KernelsAhead."""

    def __init__(self, cached: bool) -> None:
        self._cached = cached
        self.collected = 0

    def collect(self) -> None:
        self.collected += 1

    def were_cached(self) -> bool:
        return self._cached


@pytest.mark.parametrize(
    ("cached", "said", "all_shapes"),
    [
        (True, (b"", b""), False),
        (False, (b"missed", b""), True),
        (True, (b"", b"missed"), True),
    ],
)
def test_ranks_record_all_shapes_unless_each_has_cached_what_the_largest_need(
    cached: bool, said: tuple[bytes, ...], all_shapes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that recorded different graphs would wait for each other in a library's sums."""
    recorded: list[GraphKey] = []

    def record(runner: GraphRunner[object, object], key: GraphKey) -> Recording[None]:
        recorded.append(key)
        if key.variant == "random":
            raise CaptureError("no\nmore")
        return Recording(None, [])

    def build() -> list[NodeGraphs[DecodeGraphs]]:
        runner = Driver(model(), [torch.zeros(8, dtype=torch.int64)], 4).runner
        relay, table = RelayState.allocate(4, runner.model.config.vocab_size, CPU), PageTable(4, 16, CPU)
        return [
            step_graphs.decode_graphs(runner, relay, table, PhaseSwitch(backend), 4, 16)
            for backend in ("full", "none")
        ]

    def exchange(own: bytes) -> tuple[bytes, ...]:
        assert own == said[0]
        return said

    kernels = FakeKernels(cached)
    monkeypatch.setattr(GraphRunner, "record", record)
    monkeypatch.setattr(graph_start, "has_triton", lambda: True)
    monkeypatch.setattr(graph_start, "compiling_ahead", lambda device: nullcontext(kernels))
    log = DebugLines()
    graph_start.compiled(torch.device("cuda"), build, log, exchange)
    largest = [(4, variant) for variant in VARIANTS]
    smaller = [(count, VARIANTS[0]) for count in (2, 1)]
    expected = [*largest, *smaller] if all_shapes else largest
    assert [(key.shape.requests, key.variant) for key in recorded] == expected
    assert kernels.collected == len(recorded)
    assert log.kept == [("not compiled ahead", "no")]


def test_a_pass_that_does_not_fit_leaves_the_refusal_to_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank still says whether it missed any: another one would wait for it."""

    def build() -> list[NodeGraphs[DecodeGraphs]]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    exchanged: list[bytes] = []

    def exchange(own: bytes) -> list[bytes]:
        exchanged.append(own)
        return [own, b"missed"]

    monkeypatch.setattr(graph_start, "has_triton", lambda: True)
    monkeypatch.setattr(graph_start, "compiling_ahead", lambda device: nullcontext(FakeKernels(True)))
    graph_start.compiled(torch.device("cuda"), build, Log("test"), exchange)
    assert exchanged == [b""]


def test_a_node_without_a_gpu_compiles_nothing_ahead() -> None:
    def never() -> list[NodeGraphs[DecodeGraphs]]:
        raise AssertionError("built for nothing")

    graph_start.compiled(CPU, never, Log("test"))


def test_counts_of_attention_are_not_kept_where_nothing_is_launched() -> None:
    """Those of a call that is captured while its kernel compiles would be the graph's memory, which is dropped."""
    with compiling_only():
        assert not launches()
        passing = ended_programs(CPU)
    assert launches()
    assert ended_programs(CPU) is ended_programs(CPU)
    assert passing is not ended_programs(CPU)
