"""Prefill and decode ends joined by queues: real Sender, Receiver and endpoints; the test controls clock and wire."""

from __future__ import annotations

import random
import secrets
from collections import deque
from collections.abc import Callable, Sequence

from common.kv_cache.pool_layout import PoolLayout
from common.messages.identity import rank_incarnation, routing_id
from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.limits import TransferLimits
from kv_transfer.receiver import Receiver, ReceiverEvent
from kv_transfer.sender import Sender, SenderEvent
from kv_transfer.transport.base import DeviceMemory, ReceiverEndpoint, Region, SenderEndpoint
from tests.fakes.pools import layers_layout

PAGES = 16
LIMITS = TransferLimits(record_bytes=1024)
RECORD = HandoffRecord(first_token=7, num_tokens=9, cached_tokens=2)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def layout(
    num_pages: int = PAGES,
    fingerprint: str = "tiny",
    dtype: str = "float32",
    page_size: int = 2,
    heads: int = 2,
) -> PoolLayout:
    return layers_layout(fingerprint, dtype, page_size, num_pages, [(heads, 4), (heads, 4)])


def noise(nbytes: int, seed: int = 1) -> bytearray:
    return bytearray(random.Random(seed).randbytes(nbytes))


def page_bytes(memory: memoryview | DeviceMemory, shape: PoolLayout, page: int) -> bytes:
    """Return the bytes of one page over all planes, of a pool in host memory."""
    assert isinstance(memory, memoryview)
    return b"".join(
        bytes(memory[plane.offset + page * plane.page_bytes : plane.offset + (page + 1) * plane.page_bytes])
        for plane in shape.planes
    )


class Prefill:
    """One rank of a prefill node; `incarnation` is the node's."""

    def __init__(
        self,
        clock: Clock,
        endpoint: SenderEndpoint,
        limits: TransferLimits = LIMITS,
        seed: int = 1,
        incarnation: str = "",
        *,
        shape: PoolLayout | None = None,
        kv: memoryview | None = None,
        node: str = "prefill-0",
        keeps_name: Callable[[bytes], bool] = lambda identity: False,
    ) -> None:
        self.layout = shape or layout()
        leader = incarnation or secrets.token_hex(16)
        self.incarnation = rank_incarnation(leader, self.layout.tp_rank)
        self.kv = memoryview(noise(self.layout.total_bytes, seed)) if kv is None else kv
        self.endpoint = endpoint
        endpoint.register(self.layout, self.kv)
        self.decodes: dict[bytes, Decode] = {}
        self.sent: list[tuple[bytes, bytes]] = []  # all frames so far
        self.sender = Sender(leader, node, endpoint, self.layout, self._send, clock, limits, keeps_name)

    def _send(self, peer: bytes, frame: bytes) -> bool:
        self.sent.append((peer, frame))
        if peer in self.decodes:
            self.decodes[peer].inbox.append((self.incarnation, frame))
            return True
        return False

    def poll(self) -> list[SenderEvent]:
        return self.sender.poll()


class Decode:
    """One rank of a decode node; `incarnation` is the node's."""

    def __init__(
        self,
        clock: Clock,
        endpoint: ReceiverEndpoint,
        limits: TransferLimits = LIMITS,
        *,
        shape: PoolLayout | None = None,
        node: str = "decode-0",
        record_slots: int = 4,
        incarnation: str = "",
        identity: bytes = b"",
    ) -> None:
        self.layout = shape or layout()
        leader = incarnation or secrets.token_hex(16)
        self.incarnation = rank_incarnation(leader, self.layout.tp_rank)
        self.identity = identity or routing_id(node, self.incarnation).encode()
        self.kv = endpoint.allocate(Region.KV, self.layout.total_bytes)
        self.endpoint = endpoint
        self.inbox: deque[tuple[str, bytes]] = deque()
        self.receiver = Receiver(leader, node, endpoint, self.layout, clock, limits, record_slots)

    def connect(self, prefill: Prefill, deliver: Callable[[bytes], object] | None = None) -> None:
        """Connect. `deliver` replaces the prefill's `handle`, so that a test can hold frames back."""
        prefill.decodes[self.identity] = self
        self.receiver.connect(
            prefill.incarnation, deliver or (lambda frame: prefill.sender.handle(self.identity, frame))
        )

    def pump(self) -> None:
        while self.inbox:
            self.receiver.handle(*self.inbox.popleft())

    def poll(self) -> list[ReceiverEvent]:
        self.pump()
        return self.receiver.poll()


def send_all(prefill: Prefill, room: int, src_pages: Sequence[int], held: int = 0, chunk: int = 2) -> None:
    """Send pages in chunks, then the record."""
    for start in range(0, len(src_pages), chunk):
        prefill.sender.send_pages(room, src_pages[start : start + chunk], held + start)
    prefill.sender.finish(room, RECORD)


def same_pages(prefill: Prefill, src: Sequence[int], decode: Decode, dst: Sequence[int]) -> bool:
    return all(
        page_bytes(prefill.kv, prefill.layout, a) == page_bytes(decode.kv, decode.layout, b)
        for a, b in zip(src, dst, strict=True)
    )
