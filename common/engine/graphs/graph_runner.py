"""The runner of every captured forward: it combines a CaptureSpec, a backend, a program and slots.

load     the live batch into padded static inputs
plan     host-side work of the batch, outside the graph
replay   the graph, or run the program itself if no graph can serve the batch
narrow   the outputs to the live rows
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from common.engine.collectives.group import capturing
from common.engine.graphs.admission import BatchFacts, Fallback, ReplayDecision, admit
from common.engine.graphs.backends.base import Backend, GraphCompilation, Recording
from common.engine.graphs.outputs import OutputSpec
from common.engine.graphs.report import CaptureRow, GraphCounters
from common.engine.graphs.slots import Inputs, Slot, StaticInputs
from common.engine.graphs.spec import CaptureSpec, GraphKey, ShapeKey
from common.engine.ops.triton_kernel import COMPILE_ERRORS
from common.messages.identity import GraphTotals
from common.observability.start_progress import progressed

Batch = TypeVar("Batch")
Output = TypeVar("Output")
BatchIn = TypeVar("BatchIn")
OutputOut = TypeVar("OutputOut", covariant=True)


class Program(Protocol[BatchIn, OutputOut]):
    """The captured computation. `run` reads only the inputs and its own device state, nothing else of a batch."""

    def slots(self) -> Sequence[Slot[BatchIn]]:
        """Return the inputs of `run`."""
        ...

    def facts(self, batch: BatchIn) -> BatchFacts:
        """Return the facts that decide which graph, if any, serves the batch."""
        ...

    def idle(self, shape: ShapeKey) -> BatchIn:
        """Return a batch of padding only, which is planned while a graph of this shape is captured."""
        ...

    def plan(self, batch: BatchIn, inputs: Inputs) -> None:
        """Do all work on host data. `inputs` may have more rows than the batch, which are padding."""
        ...

    def run(self, inputs: Inputs, variant: str) -> OutputOut:
        """Do the work on the device. The same code is warmed up, captured and run eagerly."""
        ...


class GraphRunner(Generic[Batch, Output]):
    """Replays a captured graph that fits, and otherwise runs the program on the batch's own tensors."""

    def __init__(
        self,
        spec: CaptureSpec,
        backend: Backend,
        program: Program[Batch, Output],
        outputs: OutputSpec[Output],
        device: torch.device,
        poisoned: bool = False,
    ) -> None:
        """`poisoned`: see `StaticInputs`."""
        self.spec = spec
        self.counters = GraphCounters()
        self.rows: list[CaptureRow] = []  # results of `capture`, in its order
        self._backend = backend
        self.program = program
        self.inputs = StaticInputs(program.slots(), spec.largest, device, poisoned)
        self._outputs = outputs
        self._recordings: dict[GraphKey, Recording[Output]] = {}

    @property
    def captured(self) -> list[GraphKey]:
        return list(self._recordings)

    @property
    def compilation(self) -> GraphCompilation | None:
        """The code that was compiled before capture; its time is not in the seconds of `rows`."""
        return self._backend.compilation

    def totals(self) -> GraphTotals:
        """Return what the runner has replayed and run eagerly since its start."""
        return self.counters.totals(self.spec, len(self._recordings))

    def capture(self, shapes: Sequence[ShapeKey] | None = None) -> None:
        """Capture all shapes, the largest first, so that the pool is sized once.

        A shape that fails runs eagerly; `rows` contain the reasons.

        Args:
            shapes: a subset of the spec's shapes, for a trial of the memory that graphs take.
        """
        self.rows += map(self.capture_one, self.keys(shapes))

    def keys(self, shapes: Sequence[ShapeKey] | None = None) -> list[GraphKey]:
        """Return the keys of these shapes, by default of all, the largest first."""
        wanted = self.spec.shapes if shapes is None else shapes
        return [GraphKey(shape, variant) for shape in reversed(wanted) for variant in self.spec.variants]

    def keep(self, keys: Collection[GraphKey]) -> None:
        """Drop the captured graphs that are not among `keys`."""
        for key in self.captured:
            if key not in keys:
                del self._recordings[key]

    def run_missing(self) -> None:
        """Run shapes without a graph eagerly once on padding, so that they compile before serving.

        The order is the same on every rank, whichever shapes failed there. Raises if that fails too.
        """
        missing = [key for key in self.keys() if key not in self._recordings]
        with torch.inference_mode():
            for key in missing:
                self.program.run(self._idle(key.shape), key.variant)
                progressed(f"run {self._named(key)}")

    def _named(self, key: GraphKey) -> str:
        return f"{self.spec.phase} of {self.spec.model}, {key.shape.tokens} tokens {key.variant}".rstrip()

    def capture_one(self, key: GraphKey) -> CaptureRow:
        """Capture one graph; the row contains the error if that fails.

        It is tried twice, since a recorder lets runs precede a capture after one that has failed.
        """
        started, error, nbytes, breaks = time.perf_counter() - self._compiling(), "", 0, 0
        try:
            recording = self._recorded(key)
            self._outputs.narrow(recording.output, key.shape, key.shape)
            self._recordings[key] = recording
            nbytes, breaks = recording.nbytes, recording.breaks
        # torch's and Triton's errors, and CaptureError; a TypeError is a defect of the code and is raised.
        except COMPILE_ERRORS as failure:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        progressed(f"captured {self._named(key)}")
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

    def _recorded(self, key: GraphKey) -> Recording[Output]:
        # Not in a handler of the error, which would keep the memory of the first attempt.
        with suppress(*COMPILE_ERRORS):
            return self.record(key)
        return self.record(key)

    def record(self, key: GraphKey) -> Recording[Output]:
        """Capture a graph and return it; within `compiling_ahead` that compiles its kernels. Raises COMPILE_ERRORS.

        The first must be kept until the last one is made: CUDA's memory pool ends with the last of its graphs.
        """
        with torch.inference_mode(), capturing():
            return self._backend.capture(partial(self.program.run, self._idle(key.shape), key.variant))

    def _idle(self, shape: ShapeKey) -> Inputs:
        """Return the planned inputs of a graph, all padding."""
        inputs = self.inputs.idle(shape)
        self.program.plan(self.program.idle(shape), inputs)
        return inputs

    def _compiling(self) -> float:
        """Return the seconds spent on compilation so far."""
        compilation = self._backend.compilation
        return 0.0 if compilation is None else compilation.seconds

    def __call__(self, batch: Batch) -> Output:
        """Run the batch and return its live rows. Raises SlotError if it does not fit the declared inputs."""
        facts = self.program.facts(batch)
        key, reason = self.choose(facts)
        with torch.inference_mode():
            if key is None:
                self.counters.fallbacks[reason] += 1
                return self._eager(batch, facts)
            inputs = self.inputs.load(batch, facts.live, key.shape)
            self.program.plan(batch, inputs)
            recording = self._recordings[key]
            recording.replay()
            self.counters.replays[key] += 1
            self.counters.live_tokens += facts.live.tokens
            self.counters.padded_tokens += key.shape.tokens - facts.live.tokens
            return self._outputs.narrow(recording.output, key.shape, facts.live)

    def _eager(self, batch: Batch, facts: BatchFacts) -> Output:
        variant = facts.variants[0]
        inputs = self.inputs.live(batch, facts.live)
        self.program.plan(batch, inputs)
        return self.program.run(inputs, variant)

    def choose(self, facts: BatchFacts) -> tuple[GraphKey | None, str]:
        """Return the graph that serves such a batch, or None and the reason why none does."""
        decision: ReplayDecision = admit(self.spec, facts)
        if decision.shape is None:
            return None, decision.reason
        for variant in facts.variants:
            key = GraphKey(decision.shape, variant)
            if key in self._recordings:
                return key, ""
        return None, Fallback.CAPTURE_FAILED
