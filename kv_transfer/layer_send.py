"""Sends the pages of a running forward to their decode nodes: layer by layer, or by copies that wait for its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_transfer.handshake import Peer
from kv_transfer.outbound import Outbound, PostedWrite
from kv_transfer.transport.base import PageList
from kv_transfer.transport.layers import LayerEndpoint, LayerWrite


@dataclass(frozen=True, slots=True)
class RoomPages:
    """Pages of the sender's pool that hold the logical pages of a room from `first` on."""

    room: int
    src_pages: Sequence[int]
    first: int


@dataclass(slots=True)
class _Group:
    """Rooms of one peer that were added together."""

    write: LayerWrite
    posted: list[PostedWrite]
    sent: int = 0  # planes

    def send_to(self, end: int) -> None:
        """Send the planes below `end` that were not sent."""
        planes = range(self.sent, end)
        self.write.send(planes)
        self.sent = planes.stop
        for posted in self.posted:
            posted.shared = True


class LayerSend:
    """Sends pages of one forward, from before its first layer until it is launched. Made by `Sender.follow`."""

    def __init__(
        self,
        endpoint: LayerEndpoint,
        find: Callable[[int], Sequence[Outbound]],
        checksums: bool,
        clock: Callable[[], float],
    ) -> None:
        self._endpoint = endpoint
        self._find = find
        self._checksums = checksums
        self._clock = clock
        self._groups: list[_Group] = []

    def add(self, pages: Sequence[RoomPages]) -> None:
        """Send pages that this forward completes, as `Sender.send_pages` does.

        May be called at any layer; the layers that are already stored are sent at once.
        """
        peers: dict[str, tuple[Peer, list[PageList], list[PostedWrite]]] = {}
        for each in pages:
            for outbound in self._find(each.room):
                begun = outbound.follow(each.src_pages, each.first, self._clock())
                if outbound.peer is not None and begun is not None:
                    _, lists, posted = peers.setdefault(outbound.peer.incarnation, (outbound.peer, [], []))
                    lists.append(begun[0])
                    posted.append(begun[1])
        for peer, lists, posted in peers.values():
            write = self._endpoint.write_layers(peer.memory, peer.plan, lists, self._checksums)
            for number, one in enumerate(posted):
                one.rest = partial(write.rest, number)
            self._groups.append(_Group(write, posted))

    def stored(self, layer: int) -> None:
        """Send up to this layer, whose keys and values are now stored. Layers are reported in order."""
        for group in self._groups:
            group.send_to(self._endpoint.layout.stored(layer))
            for posted in group.posted:
                posted.layered = True

    def queue_rest(self) -> None:
        """Send all planes that are left. The forward is launched by now; the device copies them once it has ended."""
        for group in self._groups:
            group.send_to(len(self._endpoint.layout.planes))

    def close(self) -> None:
        """End the layer-wise part once the forward is launched; `Sender.complete` sends what is left."""
        for group in self._groups:
            for posted, tickets in zip(group.posted, group.write.close(), strict=True):
                posted.tickets.extend(tickets)
                posted.launching = False
