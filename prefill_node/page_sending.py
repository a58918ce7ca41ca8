"""When the pages of a chunk leave: behind its forward, or layer by layer while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from kv_transfer.layer_send import RoomPages
from kv_transfer.sender import Sender
from prefill_node.scheduler import Chunk
from prefill_node.signalled_attention import SignalledAttention


class PageSending(Protocol):
    """What happens while a forward is launched. The node sends what is left when the forward has ended."""

    def during(self, chunks: Sequence[Chunk]) -> AbstractContextManager[None]:
        """Around the launch of their forward."""
        ...


class ByChunk:
    """Nothing: pages leave when they are complete."""

    def during(self, chunks: Sequence[Chunk]) -> AbstractContextManager[None]:
        return nullcontext()


class ByLayer:
    """Each layer's keys and values, as soon as they are stored, to the decode nodes that have granted pages by then.

    Only where attention runs eagerly: a graph without breaks is over before it would pay.
    """

    def __init__(
        self,
        attention: SignalledAttention,
        sender: Sender,
        page_size: int,
        listen: Callable[[], None],
    ) -> None:
        """`listen` hands the sender what decode nodes have said: a prompt often begins a moment before its grant."""
        self._attention = attention
        self._sender = sender
        self._page_size = page_size
        self._listen = listen

    @contextmanager
    def during(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        send, waiting = self._sender.follow(), list(chunks)

        def stored(layer: int) -> None:
            if waiting:
                self._listen()
                send.add(self._granted(waiting))
            send.stored(layer)

        with self._attention.heard_by(stored):
            try:
                yield
            finally:
                send.close()

    def _granted(self, waiting: list[Chunk]) -> list[RoomPages]:
        """Pages that this forward completes, and complete ones that wait for a forward before it."""
        found = []
        for chunk in list(waiting):
            slots = self._sender.slots(chunk.request.room)
            if slots is not None:
                waiting.remove(chunk)
                end = chunk.start + chunk.length
                found.append(chunk.request.take_pages(end, slots.held_pages, self._page_size))
        return [pages for pages in found if pages.src_pages]
