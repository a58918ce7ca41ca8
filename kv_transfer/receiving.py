"""The interface of a decode node to its transfers: a Receiver, or the ReceiverGroup of a node with several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kv_transfer.counters import ReceiverCounters
from kv_transfer.events import ReceiverEvent
from kv_transfer.inbound import Dial


class ReceivingHeartbeats(Protocol):
    """The heartbeats that a decode node sends; see ReceiverHeartbeats."""

    def announce(self, seconds: float, /) -> None: ...

    def send_due(self, waiting: Iterable[tuple[str, int]], /) -> None: ...


class PageReceiver(Protocol):
    """The methods of Receiver, which documents them."""

    @property
    def counters(self) -> ReceiverCounters: ...

    @property
    def heartbeats(self) -> ReceivingHeartbeats: ...

    @property
    def active(self) -> int: ...

    @property
    def quarantined_pages(self) -> int: ...

    def connect(
        self, peer_incarnation: str, send: Callable[[bytes], object], dial: Dial | None = None
    ) -> None: ...

    def dial_ranks(self, incarnation: str) -> None: ...

    def handle(self, peer_incarnation: str, message: bytes) -> None: ...

    def open(
        self,
        room: int,
        peers: Sequence[str],
        pages: Sequence[int],
        held_pages: int,
        deadline: float | None = None,
        state_slot: int = 0,
    ) -> int: ...

    def abort(self, room: int, reason: str) -> None: ...

    def close(self, room: int) -> None: ...

    def peer_lost(self, incarnation: str) -> None: ...

    def link_lost(self, incarnation: str) -> None: ...

    def link_works(self, incarnation: str) -> None: ...

    def poll(self) -> list[ReceiverEvent]: ...

    def shutdown(self) -> None: ...
