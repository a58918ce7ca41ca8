"""The interface of a prefill node to its transfers: a Sender, or the SenderGroup of a node with several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.counters import SenderCounters
from kv_transfer.events import SenderEvent
from kv_transfer.handshake import PeerTable
from kv_transfer.outbound_room import GrantedSlots


class SendingHeartbeats(Protocol):
    """The heartbeats that a prefill node sends; see SenderHeartbeats."""

    def announce(self, seconds: float, /) -> None: ...


class PageSender(Protocol):
    """The methods of Sender, which documents them, except those that send pages of this rank."""

    @property
    def counters(self) -> SenderCounters: ...

    @property
    def peers(self) -> PeerTable: ...

    @property
    def heartbeats(self) -> SendingHeartbeats: ...

    @property
    def poll_interval(self) -> float | None: ...

    def expect(
        self, room: int, deadline: float | None = None, decodes: Sequence[str] = ("",), pages: int = 0
    ) -> None: ...

    def slots(self, room: int) -> GrantedSlots | None: ...

    def cancel(self, room: int, code: str, reason: str) -> None: ...

    def peer_lost(self, incarnation: str) -> None: ...

    def handle(self, peer: bytes, message: bytes) -> None: ...

    def poll(self) -> list[SenderEvent]: ...
