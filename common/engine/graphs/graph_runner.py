"""The one runner of every captured forward: CaptureSpec x backend x program x slots.

load     the live batch into padded static inputs
plan     host-side work of the batch, outside the graph
replay   the graph, or the program itself where no graph may serve the batch
narrow   the outputs to the live rows
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from common.engine.graphs.admission import Admission, BatchFacts, Fallback, admit
from common.engine.graphs.backends.base import Backend, Compilation, Recording
from common.engine.graphs.outputs import OutputSpec
from common.engine.graphs.report import CaptureRow, GraphCounters
from common.engine.graphs.slots import Inputs, StaticInputs
from common.engine.graphs.spec import CaptureSpec, GraphKey, ShapeKey
from common.engine.ops.triton_kernel import COMPILE_ERRORS
from common.messages.identity import GraphTotals

Batch = TypeVar("Batch")
Output = TypeVar("Output")
BatchIn = TypeVar("BatchIn")
OutputOut = TypeVar("OutputOut", covariant=True)


class Program(Protocol[BatchIn, OutputOut]):
    """What is captured. `run` sees the inputs, its own device state and nothing else of a batch."""

    def facts(self, batch: BatchIn) -> BatchFacts:
        """What decides whether and which graph may run."""
        ...

    def idle(self, shape: ShapeKey) -> BatchIn:
        """A batch of padding alone, planned while a graph of this shape is captured."""
        ...

    def plan(self, batch: BatchIn, inputs: Inputs) -> None:
        """Everything that touches host data. `inputs` may have more rows than the batch: padding."""
        ...

    def run(self, inputs: Inputs, variant: str) -> OutputOut:
        """The work on the device. The same code is captured, warmed up and run eagerly."""
        ...


class GraphRunner(Generic[Batch, Output]):
    """Replays where a captured graph fits, and otherwise runs the program on the batch's own tensors."""

    def __init__(
        self,
        spec: CaptureSpec,
        backend: Backend,
        program: Program[Batch, Output],
        inputs: StaticInputs[Batch],
        outputs: OutputSpec[Output],
    ) -> None:
        self.spec = spec
        self.counters = GraphCounters()
        self.rows: list[CaptureRow] = []  # of `capture`, in its order
        self._backend = backend
        self._program = program
        self._inputs = inputs
        self._outputs = outputs
        self._recordings: dict[GraphKey, Recording[Output]] = {}
        self._missing: list[GraphKey] = []  # failed

    @property
    def captured(self) -> list[GraphKey]:
        return list(self._recordings)

    @property
    def compilation(self) -> Compilation | None:
        """What was compiled before capture; not in the seconds of `rows`."""
        return self._backend.compilation

    def totals(self) -> GraphTotals:
        """Return what the runner has replayed and run eagerly since its start."""
        return self.counters.totals(self.spec, len(self._recordings))

    def capture(self, shapes: Sequence[ShapeKey] | None = None) -> None:
        """All shapes, the largest first: the pool is sized once. A graph that fails runs eagerly; `rows` say why.

        Args:
            shapes: of the spec, these alone: for a trial of what graphs take.
        """
        for shape in reversed(self.spec.shapes if shapes is None else shapes):
            for variant in self.spec.variants:
                self.rows.append(self._capture(GraphKey(shape, variant)))

    def run_missing(self) -> None:
        """What failed runs eagerly once, on padding: it compiles before serving, and what cannot run at all raises."""
        with torch.inference_mode():
            for key in self._missing:
                inputs = self._inputs.idle(key.shape, key.variant)
                self._program.plan(self._program.idle(key.shape), inputs)
                self._program.run(inputs, key.variant)

    def _capture(self, key: GraphKey) -> CaptureRow:
        started, error, nbytes, breaks = time.perf_counter() - self._compiling(), "", 0, 0
        try:
            with torch.inference_mode():
                inputs = self._inputs.idle(key.shape, key.variant)
                self._program.plan(self._program.idle(key.shape), inputs)
                recording = self._backend.capture(partial(self._program.run, inputs, key.variant))
            self._outputs.narrow(recording.output, key.shape, key.shape)
            self._recordings[key] = recording
            nbytes, breaks = recording.nbytes, recording.breaks
        except COMPILE_ERRORS as failure:  # torch's, Triton's and CaptureError; a TypeError is a defect
            self._missing.append(key)
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return CaptureRow(
            phase=self.spec.phase,
            model=self.spec.model,
            backend=self._backend.name,
            tokens=key.shape.tokens,
            requests=key.shape.requests,
            variant=key.variant,
            hidden=self.spec.hidden.name,
            seconds=time.perf_counter() - self._compiling() - started,
            nbytes=nbytes,
            breaks=breaks,
            error=error,
        )

    def _compiling(self) -> float:
        """Seconds of it, until now."""
        compilation = self._backend.compilation
        return 0.0 if compilation is None else compilation.seconds

    def can_run(self, batch: Batch) -> tuple[ShapeKey | None, str]:
        """(shape, "") where a graph would serve the batch, else (None, reason). Counts nothing."""
        key, reason = self._choose(self._program.facts(batch))
        return (None, reason) if key is None else (key.shape, "")

    def __call__(self, batch: Batch) -> Output:
        """Raises SlotError where the batch does not fit the declared inputs."""
        facts = self._program.facts(batch)
        key, reason = self._choose(facts)
        with torch.inference_mode():
            if key is None:
                self.counters.fallbacks[reason] += 1
                return self._eager(batch, facts)
            inputs = self._inputs.load(batch, facts.live, key.shape, key.variant)
            self._program.plan(batch, inputs)
            recording = self._recordings[key]
            recording.replay()
            self.counters.replays[key] += 1
            self.counters.live_tokens += facts.live.tokens
            self.counters.padded_tokens += key.shape.tokens - facts.live.tokens
            return self._outputs.narrow(recording.output, key.shape, facts.live)

    def _eager(self, batch: Batch, facts: BatchFacts) -> Output:
        variant = facts.variants[0]
        inputs = self._inputs.live(batch, facts.live, variant)
        self._program.plan(batch, inputs)
        return self._program.run(inputs, variant)

    def _choose(self, facts: BatchFacts) -> tuple[GraphKey | None, str]:
        admission: Admission = admit(self.spec, facts)
        if admission.shape is None:
            return None, admission.reason
        for variant in facts.variants:
            key = GraphKey(admission.shape, variant)
            if key in self._recordings:
                return key, ""
        return None, Fallback.CAPTURE_FAILED
