"""The sender of a prefill rank other than rank 0: it does what rank 0 says and reports what happens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kv_transfer.events import Delivered, SenderEvent, TransferLost
from kv_transfer.handshake import destination_ranks
from kv_transfer.ranks.channel import AnnounceWork, FrameReader, FrameWriter, frames, send_message
from kv_transfer.ranks.sender_messages import (
    CancelRoom,
    ExpectRoom,
    RankDelivered,
    RankGranted,
    RankLost,
    SenderCommand,
    SendPages,
    commands,
)
from kv_transfer.send_order import SendOrder
from kv_transfer.sender import Sender


class SenderRank:
    """Executes the commands of rank 0 with the sender of this rank."""

    def __init__(
        self,
        sender: Sender,
        listen: Callable[[], None],
        send: Callable[[SendOrder], None],
        commands: FrameReader,
        reports: FrameWriter,
    ) -> None:
        """Execute with `sender`.

        Args:
            listen: passes the frames of this rank's peer socket to the sender.
            send: carries out an order whose pages are complete.
            commands: from rank 0.
            reports: to rank 0.
        """
        self._sender = sender
        self._listen = listen
        self._send = send
        self._commands = commands
        self._send_report = partial(send_message, reports)
        self._orders: list[SendOrder] = []  # whose plan is not known to be complete
        self._waiting: set[int] = set()  # rooms that lack grants
        self._running = 0

    @property
    def busy(self) -> bool:
        """True while writes or orders wait for something that no frame announces."""
        return self.ordered or self._sender.poll_interval is not None

    @property
    def ordered(self) -> bool:
        """True while there are orders that were not carried out: their forward has not ended, as far as is known."""
        return bool(self._orders)

    def begin(self, generation: int) -> None:
        """Record that the forward of this plan is about to be launched."""
        self._running = generation

    def turn(self, completed: int) -> bool:
        """Process everything that has arrived. `completed` is the newest plan that is complete on this rank's device.

        Returns True if something happened, so that more may follow at once.
        """
        self._listen()
        moved = self._take_commands()
        for order in self._take_orders(lambda order: order.after <= completed):
            self._send(order)
            moved = True
        for event in self._sender.poll():
            self._report(event)
            moved = True
        self._report_grants()
        return moved

    def of_running(self) -> list[SendOrder]:
        """Return the orders for pages of the running forward that have arrived since the last call.

        An order with a record stays, for `turn`: rank 0 may know of the forward's end before this rank does.
        """
        self._listen()
        self._take_commands()
        self._report_grants()
        return self._take_orders(lambda order: order.after == self._running and order.record is None)

    def close(self) -> None:
        """End all rooms and detach all peers; the rank ends."""
        self._sender.close()

    def _take_commands(self) -> bool:
        moved = False
        for frame in frames(self._commands):
            self._execute(commands.decode(frame))
            moved = True
        return moved

    def _execute(self, command: SenderCommand) -> None:
        if isinstance(command, SendPages):
            self._orders.append(command.order)
        elif isinstance(command, ExpectRoom):
            decodes = destination_ranks(self._sender.endpoint.layout, command.leader, command.size)
            if decodes:
                self._sender.expect(command.room, command.deadline, decodes, command.pages)
                self._waiting.add(command.room)
        elif isinstance(command, CancelRoom):
            self._sender.cancel(command.room, command.code, command.reason)
        elif isinstance(command, AnnounceWork):
            self._sender.heartbeats.announce(command.seconds)
        else:
            self._sender.peer_lost(command.leader)

    def _take_orders(self, ready: Callable[[SendOrder], bool]) -> list[SendOrder]:
        """Remove and return the orders that are ready, except those that follow another one of their room.

        Orders of rooms that have ended, or of which this rank sends nothing, are dropped.
        """
        found: list[SendOrder] = []
        kept: list[SendOrder] = []
        for order in self._orders:
            if order.room in self._sender.rooms:
                blocked = any(earlier.room == order.room for earlier in kept)
                (found if ready(order) and not blocked else kept).append(order)
        self._orders = kept
        return found

    def _report_grants(self) -> None:
        for room in list(self._waiting):
            if self._sender.slots(room) is not None:
                self._waiting.discard(room)
                self._send_report(RankGranted(room))

    def _report(self, event: SenderEvent) -> None:
        if isinstance(event, Delivered):
            self._send_report(RankDelivered(event.room))
        elif isinstance(event, TransferLost):
            self._waiting.discard(event.room)
            self._send_report(RankLost(event.room, event.code, event.reason))
