"""A worker that receives its plans as bytes, as ranks in other processes would."""

from __future__ import annotations

import msgspec

from decode_node.step_plan import StepPlan
from decode_node.step_result import Launched, Worker


class WireWorker:
    """Encodes and decodes every plan, so a plan that holds anything but data fails."""

    def __init__(self, inner: Worker) -> None:
        self._inner = inner
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepPlan)

    def apply(self, plan: StepPlan, /) -> Launched:
        decoded = self._decoder.decode(self._encoder.encode(plan))
        assert decoded == plan, "a plan says the same after the wire"
        return self._inner.apply(decoded)
