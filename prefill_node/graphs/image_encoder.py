"""The graphs of a vision encoder with a fixed image size: pixels to embeddings, one full graph per number of images.

Images are independent of each other and attention reads no lengths, so no break is needed, and a padding image costs
only its arithmetic. In shapes and counters an image takes the place of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.forward.batch import ForwardMode
from common.engine.graphs.admission import BatchFacts
from common.engine.graphs.backends.base import Backend
from common.engine.graphs.graph_runner import GraphRunner
from common.engine.graphs.outputs import OutField, OutputSpec
from common.engine.graphs.slots import Inputs, Slot
from common.engine.graphs.spec import Axis, CaptureSpec, ShapeKey, request_shapes
from common.engine.models.llava import LlavaPart
from common.engine.models.vision_part import Pixels


@dataclass(frozen=True, slots=True)
class EncoderCall:
    """One forward over new images."""

    pixels: Tensor  # [I, 3, size, size] on the device


@dataclass(frozen=True, slots=True)
class EncodedImages:
    rows: Tensor  # [I, tokens of an image, H]


OUTPUTS = OutputSpec(EncodedImages, {"rows": OutField(Axis.REQUEST)})


def encoder_spec(image_counts: Sequence[int], tokens_per_image: int) -> CaptureSpec:
    """Return the spec of one graph for each number of images, in ascending order."""
    return CaptureSpec(
        model="target",
        phase="encoder",
        mode=ForwardMode.EXTEND,
        shapes=request_shapes(tuple(image_counts), tokens_per_image),
        tokens_per_request=tokens_per_image,
    )


class EncoderProgram:
    """A graph `Program`: vision tower and projector over [I] images."""

    def __init__(self, part: LlavaPart) -> None:
        self._part = part
        size = part.config.image_size
        self._image = (3, size, size)

    def slots(self) -> list[Slot[EncoderCall]]:
        dtype = self._part.placement.dtype
        return [Slot("pixels", Axis.REQUEST, self._image, dtype, lambda call: call.pixels)]

    def facts(self, call: EncoderCall) -> BatchFacts:
        count = len(call.pixels)
        return BatchFacts(ForwardMode.EXTEND, ShapeKey(count * self._part.config.tokens_per_image, count))

    def idle(self, shape: ShapeKey) -> EncoderCall:
        placement = self._part.placement
        empty = torch.empty((shape.requests, *self._image), dtype=placement.dtype, device=placement.device)
        return EncoderCall(empty)

    def plan(self, call: EncoderCall, inputs: Inputs) -> None:
        """No-op: the host knows only the number of images."""

    def run(self, inputs: Inputs, variant: str) -> EncodedImages:
        return EncodedImages(self._part.encode(inputs["pixels"]))


class EncoderGraphs:
    """A `VisionPart` that returns the same rows as the wrapped part, using graphs where they fit.

    Rows are views of static memory: consume them on the same stream before the next call, or clone them.
    """

    def __init__(self, part: LlavaPart, spec: CaptureSpec, backend: Backend, poisoned: bool = False) -> None:
        device = part.placement.device
        self.graphs = GraphRunner(spec, backend, EncoderProgram(part), OUTPUTS, device, poisoned)
        self._part = part

    def __call__(self, images: Sequence[Pixels]) -> list[Tensor]:
        encoded = self.graphs(EncoderCall(self._part.pixels(images)))
        return list(encoded.rows[:, None])

    def examples(self) -> Sequence[Sequence[Pixels]]:
        return self._part.examples()
