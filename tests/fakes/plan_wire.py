"""Workers that get plans and send orders as bytes, as ranks in other processes do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

import msgspec

import decode_node.step_result
import prefill_node.step_result
from decode_node.step_plan import Masks, StepPlan
from kv_transfer.send_order import SendOrder
from prefill_node.step_plan import PromptPlan

Message = TypeVar("Message", bound=msgspec.Struct)


class Wire(Generic[Message]):
    """Encodes and decodes every message: one that holds anything but data fails."""

    def __init__(self, kind: type[Message]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)

    def __call__(self, message: Message) -> Message:
        decoded = self._decoder.decode(self._encoder.encode(message))
        assert decoded == message, "a message says the same after the wire"
        return decoded


class WireWorker:
    """The worker of a decode node."""

    def __init__(self, inner: decode_node.step_result.Worker) -> None:
        self._inner = inner
        self._plans, self._masks = Wire(StepPlan), Wire(Masks)

    def apply(self, plan: StepPlan, /) -> decode_node.step_result.Launched:
        return self._inner.apply(self._plans(plan))

    def unsaved(self) -> Collection[int]:
        return self._inner.unsaved()

    def trees(self) -> decode_node.step_result.Trees:
        return self._inner.trees()

    def draw(self, masks: Masks, /) -> None:
        self._inner.draw(self._masks(masks))


class WirePromptWorker:
    """The worker of a prefill node."""

    def __init__(self, inner: prefill_node.step_result.Worker) -> None:
        self._inner = inner
        self._plans, self._orders = Wire(PromptPlan), Wire(SendOrder)

    def apply(self, plan: PromptPlan, /) -> prefill_node.step_result.Launched:
        return self._inner.apply(self._plans(plan))

    def granted(self) -> None:
        self._inner.granted()

    def send(self, order: SendOrder, /) -> None:
        self._inner.send(self._orders(order))


def wired(orders: Callable[[], Sequence[SendOrder]]) -> Callable[[], list[SendOrder]]:
    """Pass on the orders that a worker asks for while a forward runs, over the wire."""
    wire = Wire(SendOrder)
    return lambda: [wire(order) for order in orders()]
