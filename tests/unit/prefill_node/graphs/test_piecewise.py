"""Prompt graphs of a body that torch.compile has split at attention, on tape segments."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import prefill_node.build
from common.config.schema import PrefillSection
from common.engine.attention.paged import PagedAttention
from common.engine.forward.batch import CaptureHiddenMode
from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs import node_graphs
from common.engine.graphs.admission import Fallback
from common.engine.graphs.backends.tape import TapeRecorder
from common.engine.graphs.node_graphs import NodeGraphs
from common.engine.graphs.report import table
from common.engine.graphs.rules import PhaseSwitch
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.models.model_registry import build_model
from common.errors import ConfigError
from prefill_node.graphs import prompt_graphs
from prefill_node.graphs.backends import compiled_body, compiled_piece
from prefill_node.graphs.backends.compiled_body import CompiledBodies, missing_compiler
from prefill_node.graphs.backends.piecewise import PiecewiseGraphs
from prefill_node.graphs.prefill_extend import PrefillExtend, extend_spec
from tests.fakes.rounding import expect_close
from tests.fakes.tiny_model import CONFIG
from tests.unit.engine.graphs.rig import BODIES, CPU, extend_driver, model, piecewise, sequences
from tests.unit.engine.paged_driver import Driver

NULL = CaptureHiddenMode.NULL
IDS = sequences((60, 41, 23, 9))
BUCKETS = (4, 8, 16, 32, 48)
# (sequences, new tokens of each) for every bucket, growing and shrinking
STEPS = [([0], [4]), ([0, 1], [20, 9]), ([2, 3], [6, 2]), ([1], [15]), ([0], [8]), ([0, 2], [20, 15])]


def fresh(layers: int, change: Callable[[CausalLM], None] = lambda model: None) -> CausalLM:
    """A model that no other test has compiled."""
    config = replace(CONFIG, num_layers=layers, sliding_windows=(None,) * layers)
    made = build_model(config, Placement(torch.float32, CPU)).eval()
    generator = torch.Generator().manual_seed(layers)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3, generator=generator)
    change(made)
    return made


def drivers(
    model: CausalLM, bodies: CompiledBodies, attention: type[PagedAttention] = PagedAttention
) -> tuple[Driver, Driver, PrefillExtend]:
    """An eager driver, and one under graphs, captured whatever the result."""
    eager, driver = Driver(model, IDS, 4), Driver(model, IDS, 4)
    windows = model.config.sliding_windows
    runner = ModelRunner(model, driver.pool, attention(driver.pool, windows))
    backend = PiecewiseGraphs(TapeRecorder(), bodies)
    extend = PrefillExtend(runner, extend_spec(BUCKETS, NULL), backend)
    extend.graphs.capture()
    driver.runner = extend  # type: ignore[assignment]  # has the same call signature
    return eager, driver, extend


def compare(eager: Driver, driver: Driver, **close: Any) -> None:
    for rows, lengths in STEPS:
        actual, expected = (each.run(rows, lengths).logits for each in (driver, eager))
        if close:
            torch.testing.assert_close(actual, expected, rtol=0, **close)
            assert torch.equal(actual.argmax(-1), expected.argmax(-1))
        else:
            assert torch.equal(actual, expected)


def test_breaks_are_the_layers_and_pieces_lie_between() -> None:
    """One compilation serves every bucket, and the capture time includes it."""
    _, extend = extend_driver(IDS, piecewise(), BUCKETS)
    assert {row.breaks for row in extend.graphs.rows} == {model().config.num_layers}
    assert {row.backend for row in extend.graphs.rows} == {"piecewise-eager-tape"}
    before = BODIES.compilation
    _, again = extend_driver(IDS, piecewise(), BUCKETS)
    assert again.graphs.compilation == before
    assert before.seconds > 0
    (*_, line) = table(again.graphs.rows, again.graphs.compilation).splitlines()
    assert line.startswith(f"compiled by eager in {before.seconds:.2f} s: {before.kinds} kinds in")


def test_layers_that_are_alike_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers and five pieces need three compilations; each appears as one operation on a tape."""
    compiled = []

    def as_it_is(piece: Any) -> Any:
        compiled.append(piece)
        return piece

    monkeypatch.setattr(compiled_piece, "compile_piece", as_it_is)
    bodies = CompiledBodies("inductor")
    eager, driver, extend = drivers(fresh(4), bodies)
    made = bodies.compilation
    assert (made.compiler, made.pieces, made.kinds, len(compiled)) == ("inductor", 5, 3, 3)
    assert {row.backend for row in extend.graphs.rows} == {"piecewise-inductor-tape"}
    compare(eager, driver)
    assert extend.graphs.counters.replays.total() == len(STEPS)


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler: g++"
)
@pytest.mark.filterwarnings("ignore")
def test_inductor_writes_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, products and activations are opened for it: close to eager, equal tokens."""
    from torch._inductor import cpu_vec_isa

    # else six programs are compiled to detect it
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    eager, driver, extend = drivers(fresh(1), CompiledBodies("inductor"))
    assert not [row.error for row in extend.graphs.rows if row.error]
    compare(eager, driver, atol=1e-4)
    assert extend.graphs.counters.replays.total() == len(STEPS)


class Choosy(nn.Module):
    """Computes the same result in two ways, depending on the number of tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out + 0.0 if len(x) > 8 else out


def choosy(model: CausalLM) -> None:
    layer: Any = model.layers[0]  # type: ignore[index]
    layer.input_layernorm = Choosy(layer.input_layernorm)


def test_sizes_that_the_trace_is_not_of_run_eagerly() -> None:
    """What torch would guard at each call is checked when a size is captured."""
    eager, driver, extend = drivers(fresh(1, choosy), CompiledBodies())
    errors = {row.tokens: row.error for row in extend.graphs.rows}
    assert {tokens for tokens, error in errors.items() if error} == {4, 8}
    assert "which does not hold for 8 tokens" in errors[8]
    compare(eager, driver)
    assert extend.graphs.counters.fallbacks == {Fallback.CAPTURE_FAILED: 3}
    assert extend.graphs.counters.replays.total() == 3


class Asking(nn.Module):
    """Branches on computed values, which nothing captured may do."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x * 3


def asking(model: CausalLM) -> None:
    layer: Any = model.layers[0]  # type: ignore[index]
    layer.input_layernorm = Asking()


def test_a_body_that_cannot_be_compiled_runs_eagerly_and_is_tried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an exception in capture every bucket says why, and every batch is counted."""
    tried = []
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kw: (tried.append(1), compile_it(*args, **kw))[1])
    eager, driver, extend = drivers(fresh(1, asking), CompiledBodies())
    assert len(tried) == 1
    assert all("torch.compile with eager: Unsupported" in row.error for row in extend.graphs.rows)
    compare(eager, driver)
    assert extend.graphs.counters.fallbacks == {Fallback.CAPTURE_FAILED: len(STEPS)}


def test_an_error_of_ours_while_torch_compiles_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch wraps it in an exception of its own, which would look like a body that cannot be compiled."""
    monkeypatch.setattr(compiled_body, "form", lambda piece, missing: "")
    with pytest.raises(TypeError, match="missing"):
        drivers(model(), CompiledBodies())


class Fussy(PagedAttention):
    refused = 0

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if len(query) == self.refused:
            raise RuntimeError("not so many")
        return super().forward(layer, query, key, value)


@pytest.mark.parametrize("tokens", [48, 16])
def test_an_exception_in_one_capture_leaves_the_others(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that bucket runs eagerly, counted; the body stays compiled even if its first run failed."""
    monkeypatch.setattr(Fussy, "refused", tokens)
    _, driver, extend = drivers(model(), CompiledBodies(), Fussy)
    assert [(row.tokens, row.error) for row in extend.graphs.rows if row.error] == [
        (tokens, "RuntimeError: not so many")
    ]
    driver.run([0], [tokens - 1])
    driver.run([1], [8])
    assert extend.graphs.counters.fallbacks == {Fallback.CAPTURE_FAILED: 1}
    assert extend.graphs.counters.replays.total() == 1


def test_models_of_one_process_do_not_know_of_each_other() -> None:
    """torch remembers sizes by source location: it would take the width of another model for a varying one."""
    bodies = CompiledBodies()
    for width in (32, 48, 64):
        config = replace(CONFIG, num_layers=1, sliding_windows=(None,), hidden_size=width)
        made = build_model(config, Placement(torch.float32, CPU)).eval()
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.normal_(std=0.3)
        eager, driver, extend = drivers(made, bodies)
        assert [row.error for row in extend.graphs.rows] == [""] * len(BUCKETS)
        expect_close(driver.run([0], [16]).logits, eager.run([0], [16]).logits)
    assert bodies.compilation.pieces == 6


def test_one_token_replays_as_two() -> None:
    """A trace treats a size of 1 as a constant, so no graph has one token."""
    driver = Driver(model(), IDS, 4)
    graphs = prompt_graphs.prefill_graphs(driver.runner, PhaseSwitch("piecewise"), 8, 2, NULL, BODIES)
    graphs.forward.graphs.capture()
    driver.runner = graphs.forward  # type: ignore[assignment]
    expected = Driver(model(), IDS, 4).run([0], [1]).logits
    torch.testing.assert_close(driver.run([0], [1]).logits, expected, atol=1e-4, rtol=0)
    told = node_graphs.report(graphs)
    assert (told.shapes, told.unit, told.backend) == ((2, 4, 8), "tokens", "piecewise")
    assert (told.compiler, told.pieces) == ("eager", BODIES.compilation.pieces)
    assert told.compile_seconds == round(BODIES.compilation.seconds, 2) > 0
    assert graphs.forward.graphs.counters.fallbacks == {}


def test_a_trial_and_the_graphs_after_it_compile_once() -> None:
    """Row B8's budget is measured with the bodies that serve, which a second pool does not change."""
    bodies, one = CompiledBodies(), fresh(1)
    driver = Driver(one, IDS, 4)

    def build() -> list[NodeGraphs[PrefillExtend]]:
        return [prompt_graphs.prefill_graphs(driver.runner, PhaseSwitch("piecewise"), 8, 2, NULL, bodies)]

    node_graphs.trial(build, lambda: 0)
    made = bodies.compilation
    assert made.pieces == 2
    served = Driver(one, IDS, 4)
    graphs = prompt_graphs.prefill_graphs(served.runner, PhaseSwitch("piecewise"), 8, 2, NULL, bodies)
    graphs.forward.graphs.capture()
    assert bodies.compilation == made
    served.runner = graphs.forward  # type: ignore[assignment]
    assert torch.equal(served.run([0], [8]).logits, driver.run([0], [8]).logits)
    planes = (each.pool.key(0)[1:].nan_to_num(7.0) for each in (served, driver))
    assert torch.equal(*planes)


def test_a_compiler_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(compiled_body, "has_triton", lambda: False)
    assert missing_compiler("eager", CPU) == missing_compiler("eager", torch.device("cuda")) == ""
    assert "needs a C++ compiler: install g++, or write eager" in missing_compiler("inductor", CPU)
    assert "install `triton`, or write eager" in missing_compiler("inductor", torch.device("cuda"))
    section = PrefillSection(graphs="piecewise", compiler="inductor")
    with pytest.raises(ConfigError, match="prefill.compiler: inductor needs a C"):
        prefill_node.build.compiled_bodies(section.compiler, "cpu")
    assert (
        prefill_node.build.compiled_bodies(PrefillSection().compiler, "cpu").compilation.compiler == "eager"
    )


def test_a_seam_calls_the_attention_of_the_call_in_progress() -> None:
    """A body is compiled once for all pools and static inputs, so it contains neither."""
    one, bodies = fresh(1), CompiledBodies()
    embeds, positions = torch.randn(6, 32), torch.arange(6)
    memory = StorageWeakRef(embeds.untyped_storage())
    called = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def plan(self, batch: object) -> None: ...

        def store(self, layer: int, *rest: object) -> None:
            called.append((self.name, "store", layer))

        def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            called.append((self.name, "forward", layer))
            return query * 2

    with torch.inference_mode():
        for name in ("a", "b"):
            attention: Any = Named(name)
            bodies.run_body(one, embeds, positions, attention)
    assert called == [(name, what, 0) for name in "ab" for what in ("store", "forward")]
    del embeds
    gc.collect()
    assert memory.expired()
