"""The graphs of a vision encoder for images of any size: patches to embeddings, one full graph per token bucket.

Layers work row by row, and attention reads the boundaries of windows and images from static device tensors, so all
images whose tokens fit share a graph. Operations on pixels are eager, because their shapes are those of the images. In
shapes and counters a window takes the place of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.attention.segments import Segments
from common.engine.encoder_sizes import ENCODER_BATCH
from common.engine.forward.batch import ForwardMode
from common.engine.graphs.admission import BatchFacts
from common.engine.graphs.backends.base import Backend
from common.engine.graphs.graph_runner import GraphRunner
from common.engine.graphs.outputs import OutField, OutputSpec
from common.engine.graphs.slots import Inputs, Slot
from common.engine.graphs.spec import Axis, CaptureSpec, ShapeKey
from common.engine.models.qwen_vl import PatchBatch, QwenPart
from common.engine.models.vision_part import Pixels

# A graph has room for one window per this many tokens; a full window of published models has 16.
TOKENS_PER_WINDOW = 4


@dataclass(frozen=True, slots=True)
class EncodedPatches:
    rows: Tensor  # [T, H], sorted by window


OUTPUTS = OutputSpec(EncodedPatches, {"rows": OutField(Axis.TOKEN)})


def patch_spec(token_buckets: Sequence[int]) -> CaptureSpec:
    """Return the spec of one graph for each bucket of tokens, in ascending order."""
    return CaptureSpec(
        model="target",
        phase="encoder",
        mode=ForwardMode.EXTEND,
        shapes=tuple(ShapeKey(tokens, max_windows(tokens)) for tokens in token_buckets),
    )


def max_windows(tokens: int) -> int:
    """Return the most windows that a graph for `tokens` tokens can hold."""
    return max(1, tokens // TOKENS_PER_WINDOW)


class PatchProgram:
    """A graph `Program`: blocks and merger over [T] groups of patches of at most ENCODER_BATCH images."""

    def __init__(self, part: QwenPart, largest: ShapeKey) -> None:
        self._part = part
        device = part.placement.device
        self.windows = torch.zeros(largest.requests + 1, dtype=torch.int32, device=device)
        self.images = torch.zeros(ENCODER_BATCH + 1, dtype=torch.int32, device=device)
        self._runs: tuple[Segments, Segments] | None = None  # windows and images of the planned batch

    def slots(self) -> list[Slot[PatchBatch]]:
        part = self._part
        width, dtype = part.group * part.width, part.placement.dtype
        return [
            Slot("groups", Axis.TOKEN, (width,), dtype, lambda batch: batch.groups),
            Slot("places", Axis.TOKEN, (part.group * 2,), torch.int64, lambda batch: batch.places),
        ]

    def facts(self, batch: PatchBatch) -> BatchFacts:
        windows = len(batch.windows.starts) - 1
        return BatchFacts(ForwardMode.EXTEND, ShapeKey(len(batch.groups), windows))

    def idle(self, shape: ShapeKey) -> PatchBatch:
        """Return one window of one group; the rest is padding."""
        part, device = self._part, self._part.placement.device
        starts = torch.tensor([0, part.group], dtype=torch.int32, device=device)
        run = Segments(starts, part.group, (part.group,))
        places = torch.zeros(shape.tokens, 2 * part.group, dtype=torch.int64, device=device)
        groups = places.new_zeros(shape.tokens, part.group * part.width, dtype=part.placement.dtype)
        return PatchBatch(groups, places, places[:, 0], run, run)

    def plan(self, batch: PatchBatch, inputs: Inputs) -> None:
        """Set the boundaries of windows and images: static tensors for a graph, the batch's own for an eager run."""
        groups = inputs["groups"]
        if groups is batch.groups:
            self._runs = batch.windows, batch.whole
            return
        windows = self.windows[: max_windows(len(groups)) + 1]
        self._runs = (
            Segments(_loaded(windows, batch.windows.starts), self._part.window),
            Segments(_loaded(self.images, batch.whole.starts), len(groups) * self._part.group),
        )

    def run(self, inputs: Inputs, variant: str) -> EncodedPatches:
        assert self._runs is not None, "run before plan"
        return EncodedPatches(self._part.encode(inputs["groups"], inputs["places"], *self._runs))

    def forget(self) -> None:
        """Drop the planned batch: its segments are views of the whole copied buffer, which includes the pixels."""
        self._runs = None


class PatchEncoderGraphs:
    """A `VisionPart` that returns the same rows as the wrapped part, using graphs where they fit."""

    def __init__(self, part: QwenPart, spec: CaptureSpec, backend: Backend, poisoned: bool = False) -> None:
        self._program = PatchProgram(part, spec.largest)
        device = part.placement.device
        self.graphs = GraphRunner(spec, backend, self._program, OUTPUTS, device, poisoned)
        self._part = part

    def __call__(self, images: Sequence[Pixels]) -> list[Tensor]:
        batch = self._part.batch(images)
        rows = self.graphs(batch).rows
        self._program.forget()
        return self._part.rows(rows, batch, images)

    def examples(self) -> Sequence[Sequence[Pixels]]:
        return self._part.examples()


def _loaded(static: Tensor, starts: Tensor) -> Tensor:
    """Copy boundaries; segments past the live ones become empty. Raises RuntimeError if there are too many."""
    count = len(starts)
    static[:count].copy_(starts)
    static[count:] = starts[-1]
    return static
