"""Connections to prefill nodes: one Dealer per rank, opened at the first reservation that names the node.

A prefill node that sends too many invalid frames is disconnected, and its requests are placed elsewhere.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Container

import msgspec
import zmq

from common.errors import ConfigError, HandshakeRefused, Overloaded, TransferFailed
from common.ipc import Dealer, LinkSecurity
from common.ipc.bad_frames import BadFrames
from common.messages.identity import NodeRef, routing_id
from common.observability.bounded_log import BoundedLog
from common.observability.logs import Log
from kv_transfer.receiving import PageReceiver

MAX_PEERS = 256
# A link that is silent for this long counts as broken. Together with LINK_SECONDS it bounds a request's wait.
SILENCE_SECONDS = 1.5
LINK_SECONDS = 1.5  # without a connection for this long, a link's requests fail and are placed on other nodes


class PeerConnections:
    """Owns the sockets to prefill nodes; the receiver owns the protocol."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        incarnation: str,
        receiver: PageReceiver,
        poller: zmq.Poller,
        security: LinkSecurity | None = None,
    ) -> None:
        self._context = context
        self._name = name
        self._incarnation = incarnation
        self._receiver = receiver
        self._poller = poller
        self._security = security
        self._dealers: dict[str, Dealer] = {}  # prefill incarnation -> socket
        self._names: dict[str, str] = {}  # prefill incarnation -> NAME/INCARNATION
        self._leaders: dict[str, str] = {}  # prefill incarnation -> that of rank 0 of its node
        self._resets: dict[str, int] = {}  # resets of each socket that have been handled
        self._broken: set[str] = set()  # those of `_lost` whose link is broken but that may be alive
        self._lost: set[str] = set()  # prefill nodes that need a (new) Hello before pages are reserved
        self._cut_off: OrderedDict[str, None] = OrderedDict()  # incarnations, the latest MAX_PEERS
        self._log = Log("links")
        self._bad = BadFrames(BoundedLog(self._log, "refused a frame"))

    @property
    def connected(self) -> frozenset[str]:
        """Incarnations of the prefill nodes to which a socket is open."""
        return frozenset(self._dealers)

    def ensure(self, peer: NodeRef) -> None:
        """Connect to a prefill node and send Hello, unless done already; a lost node gets a new Hello.

        Raises RequestError, immediately if the link is known to be broken.
        """
        if peer.incarnation not in self._dealers or peer.incarnation in self._lost:
            send = self._reach(peer, peer.incarnation)
            self._receiver.connect(peer.incarnation, send, functools.partial(self._dial, peer))
            self._greeted(peer.incarnation)
        elif any(self._leaders[each] == peer.incarnation for each in self._lost):
            try:
                self._receiver.dial_ranks(peer.incarnation)
            except HandshakeRefused as error:
                raise TransferFailed(str(error)) from error

    def _dial(self, node: NodeRef, incarnation: str, address: str) -> Callable[[bytes], object]:
        """Connect to another rank of a prefill node; its Hello follows."""
        rank = msgspec.structs.replace(node, incarnation=incarnation, peer_address=address)
        send = self._reach(rank, node.incarnation)
        self._greeted(incarnation)
        return send

    def _reach(self, peer: NodeRef, leader: str) -> Callable[[bytes], object]:
        """Return what sends to a prefill rank, over a new socket if there is none. Raises RequestError."""
        if peer.incarnation in self._cut_off:
            raise TransferFailed(
                f"prefill node {peer.name} sent too many invalid frames to this decode node; restart it"
            )
        dealer = self._dealers.get(peer.incarnation)
        if dealer is None:
            dealer = self._open(peer)
            self._leaders[peer.incarnation] = leader
        if dealer.disconnected_for() > LINK_SECONDS:
            raise TransferFailed(f"prefill node {peer.name} cannot be reached from this decode node")
        return functools.partial(self._send, peer.incarnation)

    def _greeted(self, incarnation: str) -> None:
        self._lost.discard(incarnation)
        self._broken.discard(incarnation)

    def pump(self) -> None:
        """Pass everything that has arrived to the receiver and detect broken links."""
        for incarnation, dealer in list(self._dealers.items()):
            name, bad = self._names[incarnation], self._receiver.counters.malformed + dealer.damaged
            for frame in dealer.drain():
                self._receiver.handle(incarnation, frame)
            bad = self._receiver.counters.malformed + dealer.damaged - bad
            if any(self._bad.count(name, "not a message for a decode node") for _ in range(bad)):
                self._cut(incarnation)
            else:
                self._look_at_link(incarnation, dealer)
        self._bad.flush()

    def _look_at_link(self, incarnation: str, dealer: Dealer) -> None:
        if dealer.resets != self._resets[incarnation]:
            self._resets[incarnation] = dealer.resets
            # another process listens at the address, or the peer has forgotten this node
            self.lost(incarnation)
        elif incarnation not in self._lost and dealer.disconnected_for() > LINK_SECONDS:
            self._receiver.link_lost(incarnation)
            self._lost.add(incarnation)
            self._broken.add(incarnation)  # the socket stays open and detects when the link works again
        elif dealer.disconnected_for() == 0.0:
            self._receiver.link_works(incarnation)

    def _cut(self, incarnation: str) -> None:
        self._log.error(
            "disconnected a prefill node that sends invalid frames", peer=self._names[incarnation]
        )
        self._receiver.link_lost(incarnation)
        self._close(incarnation)
        self._cut_off[incarnation] = None
        if len(self._cut_off) > MAX_PEERS:
            self._cut_off.popitem(last=False)

    def _send(self, incarnation: str, frame: bytes) -> bool:
        dealer = self._dealers.get(incarnation)
        return dealer is not None and dealer.send(frame)

    def lost(self, incarnation: str) -> None:
        """Note that a node, or one of its ranks, counts as lost.

        The sockets stay open: if it lives, it has aborts to acknowledge.
        """
        ranks = [rank for rank, leader in self._leaders.items() if incarnation in (rank, leader)]
        for each in ranks or [incarnation]:
            self._receiver.peer_lost(each)
            self._broken.discard(each)
            if each in self._dealers:
                self._lost.add(each)

    def all_lost(self) -> None:
        """Note that all prefill nodes have forgotten this node: each needs a new Hello before the next reservation."""
        for incarnation in list(self._dealers):
            self.lost(incarnation)

    def close_unused(self, needed: Container[str]) -> None:
        """Close the sockets to lost nodes, except those that a request still names, possibly in quarantine."""
        for incarnation in self._lost - self._broken:
            if incarnation not in needed and self._leaders[incarnation] not in needed:
                self._close(incarnation)

    def _close(self, incarnation: str) -> None:
        self._lost.discard(incarnation)
        self._broken.discard(incarnation)
        dealer = self._dealers.pop(incarnation)
        del self._resets[incarnation], self._names[incarnation], self._leaders[incarnation]
        self._poller.unregister(dealer.socket)
        dealer.close()

    def _open(self, peer: NodeRef) -> Dealer:
        if len(self._dealers) >= MAX_PEERS:
            raise Overloaded(f"this decode node is already connected to {MAX_PEERS} prefill nodes")
        # The identity contains the peer's incarnation, because a socket to an earlier incarnation reconnects to the
        # same address.
        identity = routing_id(self._name, self._incarnation, peer.incarnation).encode()
        try:
            dealer = Dealer(
                self._context,
                peer.peer_address,
                identity,
                peer.name,
                self._security,
                silence=SILENCE_SECONDS,
            )
        except (ConfigError, zmq.ZMQError) as error:
            # ZMQError: this process has run out of descriptors.
            raise TransferFailed(f"prefill node {peer.name} cannot be connected to: {error}") from error
        self._dealers[peer.incarnation] = dealer
        self._names[peer.incarnation] = f"{peer.name}/{peer.incarnation}"
        self._resets[peer.incarnation] = 0
        self._lost.add(peer.incarnation)
        self._poller.register(dealer.socket, zmq.POLLIN)
        return dealer

    def close(self) -> None:
        for dealer in self._dealers.values():
            dealer.close()
        self._dealers.clear()
