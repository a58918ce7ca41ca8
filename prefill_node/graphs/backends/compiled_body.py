"""The body of a model under torch.compile: traced once for all numbers of tokens, split at attention, then compiled.

After the first call torch's front end is bypassed: a call passes weights, inputs and the number of tokens to the
pieces. The assumptions of the trace about that number are checked instead, for each size that is captured.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from common.engine.attention.backend import AttentionBackend
from common.engine.graphs.backends.base import CaptureError, GraphCompilation
from common.engine.models.causal_lm import BodyOutput, CausalLM
from common.engine.ops.triton_kernel import has_triton
from prefill_node.graphs.backends.compiled_piece import CompiledPiece, form
from prefill_node.graphs.backends.split_body import LiveAttention, MarkedAttention, is_seam, split

EAGER, INDUCTOR = "eager", "inductor"
PACKAGE = __name__.partition(".")[0]
MIN_TOKENS = 2  # a trace treats a size of 1 as a constant


def missing_compiler(compiler: str, device: torch.device) -> str:
    """Return what `compiler` lacks on this machine, with the remedy; "" if it can run."""
    if compiler != INDUCTOR:
        return ""
    if device.type == "cuda":
        return "" if has_triton() else "inductor writes Triton kernels: install `triton`, or write eager"
    command = os.environ.get("CXX", "g++")
    return (
        "" if shutil.which(command) else f"inductor needs a C++ compiler: install {command}, or write eager"
    )


class CompiledBodies:
    """One body per model, made at its first call and kept for all later graphs. Implements `BodyHandler`.

    Args:
        compiler: `eager` runs the pieces as traced: tandem's own kernels, identical results. `inductor` generates its
            own kernels for them.
    """

    def __init__(self, compiler: str = EAGER) -> None:
        self._compiler = compiler
        self._bodies: dict[nn.Module, CompiledBody] = {}

    @property
    def compilation(self) -> GraphCompilation:
        """The compilation of all bodies together."""
        bodies = self._bodies.values()
        return GraphCompilation(
            self._compiler,
            sum(body.seconds for body in bodies),
            sum(body.pieces for body in bodies),
            sum(body.kinds for body in bodies),
        )

    def run_body(
        self, model: CausalLM, embeds: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> BodyOutput:
        """Run a body. Raises CaptureError if it cannot be compiled, or not for this many tokens."""
        if model not in self._bodies:
            self._bodies[model] = CompiledBody(model, self._compiler)
        return self._bodies[model](embeds, positions, attention)


@dataclass(frozen=True, slots=True)
class _Given:
    """Placeholder of a graph input that each call provides."""

    what: str  # embeds, positions, tokens


class CompiledBody:
    """Called like the model. The first call compiles; its number of tokens, the largest, is the compiler's hint."""

    def __init__(self, model: CausalLM, compiler: str) -> None:
        self._model = model
        self._compiler = compiler
        self._live = LiveAttention()
        self._graph: GraphModule | None = None
        self._inputs: list[Any] = []  # inputs of the graph: weights and `_Given`
        self._assumed: list[Any] = []  # sympy conditions on the number of tokens
        self._error = ""
        self.seconds = 0.0
        self.pieces = 0
        self.kinds = 0  # distinct pieces, each compiled once

    def __call__(self, embeds: Tensor, positions: Tensor, attention: AttentionBackend) -> BodyOutput:
        tokens = len(positions)
        if self._error:
            raise CaptureError(self._error)
        if tokens < MIN_TOKENS:
            raise CaptureError(f"a compiled body takes {MIN_TOKENS} tokens or more, not {tokens}")
        self._live.backend = attention
        try:
            if self._graph is None:
                return self._compile(embeds, positions)
            self._check(tokens)
            given = {"embeds": embeds, "positions": positions, "tokens": tokens}
            flat = [given[each.what] if isinstance(each, _Given) else each for each in self._inputs]
            return _body_output(self._graph(*flat))
        finally:
            self._live.backend = None

    def _compile(self, embeds: Tensor, positions: Tensor) -> BodyOutput:
        started = time.perf_counter()
        from torch._dynamo import config, mark_dynamic
        from torch._dynamo.exc import FailOnRecompileLimitHit

        model, marks = self._model, MarkedAttention()

        def body(embeds: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            last, aux = model(embeds, positions, marks)
            return (last,) if aux is None else (last, aux)

        # Compiled code is cached by code object: without its own, another model would count as a recompilation.
        body.__code__ = body.__code__.replace()
        examples = [embeds.view_as(embeds), positions.view_as(positions)]
        for example in examples:
            mark_dynamic(example, 0)

        def backend(graph: GraphModule, inputs: list[Any]) -> Any:
            parts = self._assemble(split(graph))
            symbols = [each for each in inputs if isinstance(each, torch.SymInt)]

            def first(*flat: Any) -> Any:
                self._inputs = [self._bound(value, *examples) for value in flat]
                self._assumed = [guard.expr for each in symbols[:1] for guard in each.node.shape_env.guards]
                self.seconds = time.perf_counter() - started
                self._graph = parts
                return parts(*flat)

            return first

        try:
            # Otherwise a width in which this model differs from an earlier one would count as a dynamic size.
            with config.patch(automatic_dynamic_shapes=False):
                return _body_output(torch.compile(body, backend=backend, fullgraph=True)(*examples))
        except (RuntimeError, FailOnRecompileLimitHit) as error:
            # The compilation succeeded: only this run has failed.
            if self._graph is not None:
                raise
            cause = getattr(error, "inner_exception", error)
            if _is_defect(cause):
                raise cause from error
            reason = f"{type(cause).__name__}: {cause}".strip().splitlines()[0]
            self._error = f"torch.compile with {self._compiler}: {reason}"
            raise CaptureError(self._error) from error
        finally:
            examples.clear()  # torch keeps `backend`, and with it the static inputs of released graphs

    def _assemble(self, parts: GraphModule) -> GraphModule:
        """Connect seams to the attention backend and compile the pieces between them."""
        known: dict[str, nn.Module] = {}
        for name, part in list(parts.named_children()):
            assert isinstance(part, GraphModule)
            if is_seam(part):
                self._live.seam(part)
                continue
            self.pieces += 1
            kind = form(part)
            if self._compiler == INDUCTOR:
                if kind not in known:
                    known[kind] = CompiledPiece(part)
                setattr(parts, name, known[kind])
            known.setdefault(kind, part)
        self.kinds = len(known)
        return parts

    def _bound(self, value: Any, embeds: Tensor, positions: Tensor) -> Any:
        """Classify an argument of the first call: a weight, or an input that later calls replace."""
        if value is embeds:
            return _Given("embeds")
        if value is positions:
            return _Given("positions")
        if isinstance(value, int):
            if value != len(positions):
                raise CaptureError(f"a size of {value} varies, which is not the number of tokens")
            return _Given("tokens")
        return value

    def _check(self, tokens: int) -> None:
        """Raise CaptureError if the trace does not hold for this number of tokens."""
        for fact in self._assumed:
            if not bool(fact.subs(dict.fromkeys(fact.free_symbols, tokens))):
                raise CaptureError(
                    f"the compiled body assumes {fact}, which does not hold for {tokens} tokens"
                )


def _is_defect(error: BaseException) -> bool:
    """Return whether it is a defect of tandem's code: torch wraps whatever a compiler backend raises."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    ours = frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith(f"{PACKAGE}.")
    return ours and not isinstance(error, RuntimeError)


def _body_output(tensors: Any) -> BodyOutput:
    last, *aux = tensors
    return BodyOutput(last, aux[0] if aux else None)
