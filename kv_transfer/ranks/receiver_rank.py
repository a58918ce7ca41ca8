"""The receiver of a decode rank other than rank 0: it does what rank 0 says and reports what happens."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Protocol

from common.errors import NodeLost, RequestError, Unavailable
from common.kv_cache.pool_layout import MAX_RANKS, PoolLayout
from common.messages.identity import NodeRef, rank_incarnation
from kv_transfer.cuts import sources
from kv_transfer.events import Arrived, PagesFree, PeerForgot, ReceiverEvent, RoomFailed
from kv_transfer.ranks.channel import AnnounceWork, FrameReader, FrameWriter, frames, send_message
from kv_transfer.ranks.receiver_messages import (
    AbortRoom,
    CloseRoom,
    OpenRoom,
    RankArrived,
    RankForgotten,
    RankFreed,
    RankGaveUp,
    RankRefused,
    ReceiverCommand,
    commands,
)
from kv_transfer.receiver import Receiver


class PeerSockets(Protocol):
    """The peer sockets of this rank."""

    @property
    def connected(self) -> frozenset[str]:
        """Incarnations of the prefill ranks to which a socket is open."""
        ...

    def ensure(self, peer: NodeRef, /) -> None:
        """Connect to a prefill rank and send Hello, unless done already. Raises RequestError."""
        ...

    def pump(self) -> None:
        """Pass everything that has arrived to the receiver, and detect broken links."""
        ...

    def lost(self, incarnation: str, /) -> None:
        """Note that a prefill rank counts as lost."""
        ...

    def close_unused(self, needed: Container[str], /) -> None:
        """Close the sockets to lost prefill ranks that no request names."""
        ...


class ReceiverRank:
    """Executes the commands of rank 0 with the receiver and the peer sockets of this rank."""

    def __init__(
        self,
        receiver: Receiver,
        layout: PoolLayout,
        peers: PeerSockets,
        commands: FrameReader,
        reports: FrameWriter,
    ) -> None:
        """`layout` is that of this rank; `peers` pass their frames to `receiver`."""
        self._receiver = receiver
        self._layout = layout
        self._peers = peers
        self._commands = commands
        self._send_report = partial(send_message, reports)

    def turn(self) -> bool:
        """Process everything that has arrived. Returns True if something happened, so that more may follow at once."""
        self._peers.pump()
        moved = False
        for frame in frames(self._commands):
            self._execute(commands.decode(frame))
            moved = True
        for event in self._receiver.poll():
            self._report(event)
            moved = True
        return moved

    def close(self) -> None:
        """Withdraw the memory from all peers; the rank ends."""
        self._receiver.shutdown()

    def _execute(self, command: ReceiverCommand) -> None:
        if isinstance(command, OpenRoom):
            self._open(command)
        elif isinstance(command, CloseRoom):
            self._receiver.close(command.room)
        elif isinstance(command, AbortRoom):
            self._receiver.abort(command.room, command.reason, command.code)
        elif isinstance(command, AnnounceWork):
            self._receiver.heartbeats.announce(command.seconds)
        else:
            ranks = {rank_incarnation(command.leader, rank) for rank in range(MAX_RANKS)}
            for incarnation in ranks & self._peers.connected:
                self._peers.lost(incarnation)

    def _open(self, command: OpenRoom) -> None:
        size, ours = len(command.addresses), self._layout
        needed = sorted(sources(ours.spec, size, ours.tp_rank, ours.tp_size))
        peers = [
            NodeRef(
                name=command.prefill,
                role="prefill",
                incarnation=rank_incarnation(command.leader, rank),
                peer_address=command.addresses[rank],
            )
            for rank in needed
        ]
        self._peers.close_unused({part.link.incarnation for part in self._receiver.rooms.parts()})
        try:
            for peer in peers:
                self._peers.ensure(peer)
            self._receiver.open(
                command.room,
                [peer.incarnation for peer in peers],
                command.pages,
                command.held_pages,
                command.deadline,
                command.state_slot,
            )
        except RequestError as error:
            code = error.code
            if isinstance(error, Unavailable):
                # A process was seen to end: the next request sends Hello again.
                code = NodeLost.code
                for peer in peers:
                    self._peers.lost(peer.incarnation)
            self._send_report(RankGaveUp(command.room, code, str(error)))
            self._send_report(RankFreed(command.room))

    def _report(self, event: ReceiverEvent) -> None:
        if isinstance(event, Arrived):
            self._send_report(RankArrived(event.room))
        elif isinstance(event, RoomFailed):
            self._send_report(RankGaveUp(event.room, event.code, event.reason))
        elif isinstance(event, PagesFree):
            self._send_report(RankFreed(event.room))
        elif isinstance(event, PeerForgot):
            self._peers.lost(event.incarnation)
            self._send_report(RankForgotten(event.incarnation))
        else:
            self._peers.lost(event.incarnation)
            self._send_report(RankRefused(event.incarnation, event.reason))
