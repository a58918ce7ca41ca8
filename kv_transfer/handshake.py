"""Checks Hello, attaches the peer's memory and retires earlier incarnations of the peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.errors import HandshakeRefused
from common.exhaustion import EXHAUSTED, shortage
from common.kv_cache.pool_layout import PoolLayout
from common.messages.identity import name_in, rank_incarnation
from kv_transfer.compatible import compatible
from kv_transfer.cuts import sources
from kv_transfer.expiring import ExpiringMap
from kv_transfer.limits import TransferLimits
from kv_transfer.messages import Hello, Slots
from kv_transfer.pair_plan import PairPlan, pair_plan
from kv_transfer.transport.base import PeerMemory, SenderEndpoint, Target
from kv_transfer.transport.description import from_wire


class Refusal(HandshakeRefused):
    """Refuses a decode node. `cause` is a short metric label."""

    def __init__(self, cause: str, sentence: str) -> None:
        super().__init__(sentence)
        self.cause = cause


@dataclass(slots=True, eq=False)
class Peer:
    """A decode node that said Hello and was welcomed."""

    identity: bytes  # routing id of its latest socket
    incarnation: str
    hello: Hello
    memory: PeerMemory
    plan: PairPlan  # what this rank sends to the peer's rank
    destinations: tuple[str, ...]  # incarnations of the ranks of its node to which this rank sends
    early: int = 0  # this peer's entries in the early-slots map
    early_pages: int = 0  # pages in them
    busy_until: float = 0.0  # its loop may be silent until then
    lost: bool = False  # detached: nothing is written or sent to it any longer

    @property
    def leader(self) -> str:
        """Incarnation of rank 0 of its node, by which the router names the node."""
        return self.hello.leader or self.incarnation

    def rejects(self, slots: Slots) -> str | None:
        """Return why the slots are invalid, or None when they lie within the range that Hello described."""
        if slots.record_slot >= self.hello.record_slots:
            return f"record slot {slots.record_slot} of {self.hello.record_slots}"
        if any(page >= self.hello.layout.num_pages for page in slots.pages):
            return f"a page outside of the pool of {self.hello.layout.num_pages}"
        if len(set(slots.pages)) != len(slots.pages):
            return "a page named twice"
        if self.plan.state and not 0 < slots.state_slot < self.hello.layout.num_slots:
            return f"state slot {slots.state_slot} of {self.hello.layout.num_slots}"
        return None


def destination_ranks(ours: PoolLayout, leader: str, size: int) -> tuple[str, ...]:
    """Return the incarnations of the ranks to which the rank of `ours` sends, of a decode node of `size` ranks."""
    return tuple(
        rank_incarnation(leader, rank)
        for rank in range(size)
        if ours.tp_rank in sources(ours.spec, ours.tp_size, rank, size)
    )


class PeerTable:
    """Decode nodes by socket identity; bounded by limits.max_peers."""

    def __init__(
        self,
        endpoint: SenderEndpoint,
        limits: TransferLimits,
        retired: ExpiringMap[str, str],
        keeps_name: Callable[[bytes], bool],
    ) -> None:
        """`keeps_name` says whether a peer with this routing id keeps its name from other processes, because it lives
        and they may have the same key.
        """
        self._endpoint = endpoint
        self._limits = limits
        self._retired = retired  # incarnation -> the one that replaced it
        self._keeps_name = keeps_name
        self._peers: dict[bytes, Peer] = {}

    def all(self) -> list[Peer]:
        return list(self._peers.values())

    def identities(self) -> list[bytes]:
        """Return the routing ids of the decode nodes that were welcomed."""
        return list(self._peers)

    def at(self, identity: bytes) -> Peer | None:
        return self._peers.get(identity)

    def find(self, incarnation: str) -> Peer | None:
        for peer in self._peers.values():
            if peer.incarnation == incarnation:
                return peer
        return None

    def replaced(self, identity: bytes, incarnation: str, hello: Hello) -> list[Peer]:
        """Return the peers that this Hello replaces.

        They are earlier processes of the node, and peers with the same socket or incarnation and another Hello.
        """
        leader = hello.leader or incarnation
        return [
            peer
            for peer in self._peers.values()
            if (peer.hello.node == hello.node and peer.leader != leader)
            or (peer.identity == identity and peer.incarnation != incarnation)
            or (peer.incarnation == incarnation and peer.hello != hello)
        ]

    def check(self, identity: bytes, incarnation: str, hello: Hello) -> None:
        """Check that the peer can be served. Raises Refusal with a sentence for both logs.

        With encrypted links a key lets a node use its own name in `identity`, or any of its pattern; nothing else that
        Hello claims is proved.
        """
        if name_in(identity) != hello.node:
            raise Refusal(
                "name",
                f"decode node {name_in(identity)} says that it is decode node {hello.node}; every node speaks only "
                "under its own name",
            )
        leader = hello.leader or incarnation
        if any(self._keeps(peer, hello.node, leader) for peer in self._peers.values()):
            raise Refusal(
                "name",
                f"another process is decode node {hello.node} and is connected to this prefill node; stop that one, or "
                "start this one under another name",
            )
        newer = self._retired.get(hello.leader) or self._retired.get(incarnation)
        if newer is not None:
            raise Refusal(
                "retired",
                f"incarnation {incarnation} of decode node {hello.node} was replaced by {newer}; "
                "give every decode node its own name",
            )
        ours = self._endpoint.layout
        sentence = compatible(ours, hello.layout)
        if sentence is not None:
            raise Refusal("layout", f"decode node {hello.node}: {sentence}")
        theirs = hello.layout
        self._check_rank(incarnation, hello)
        needed = sources(ours.spec, ours.tp_size, theirs.tp_rank, theirs.tp_size)
        if ours.tp_rank not in needed:
            raise Refusal(
                "tensor_parallel",
                f"rank {theirs.tp_rank} of {theirs.tp_size} of decode node {hello.node} receives nothing from this "
                f"prefill rank, {ours.tp_rank} of {ours.tp_size}; connect it to ranks {sorted(needed)}",
            )

    def _keeps(self, peer: Peer, name: str, leader: str) -> bool:
        """Return whether a peer keeps this name from the node whose rank 0 is `leader`."""
        return peer.hello.node == name and peer.leader != leader and self._keeps_name(peer.identity)

    def _check_rank(self, incarnation: str, hello: Hello) -> None:
        """Check that the peer is the rank that it claims to be. Raises Refusal."""
        rank, size = hello.layout.tp_rank, hello.layout.tp_size
        who = f"rank {rank} of {size} of decode node {hello.node}"
        leader = hello.leader or incarnation
        if rank_incarnation(leader, rank) != incarnation:
            raise Refusal(
                "ranks",
                f"{who} has incarnation {incarnation}, which is not rank {rank} of the node {leader}; "
                "start all ranks of a node together",
            )
        known = [each.hello for each in self._peers.values() if each.leader == leader]
        if any(each.node != hello.node for each in known):
            raise Refusal("ranks", f"{who}: {leader} is another node; start all ranks of a node together")
        others = {each.layout.tp_size for each in known}
        if others - {size}:
            raise Refusal(
                "ranks", f"{who}: another rank of the same node said that there are {others.pop()} ranks"
            )

    def admit(self, identity: bytes, incarnation: str, hello: Hello) -> Peer:
        """Return the welcomed peer, after `check` has passed and `replaced` peers are dropped. Raises Refusal."""
        known = self.find(incarnation)
        if known is not None:
            # The same Hello again, possibly over a new socket.
            del self._peers[known.identity]
            known.identity = identity
            self._peers[identity] = known
            return known
        if len(self._peers) >= self._limits.max_peers:
            raise Refusal(
                "full", f"this prefill node already serves {len(self._peers)} decode nodes (limit: max_peers)"
            )
        records_bytes = hello.record_slots * hello.record_bytes
        try:
            description = from_wire(hello.transport, self._endpoint.takes)
            memory = self._endpoint.attach(
                Target(incarnation, description, hello.layout.total_bytes, records_bytes)
            )
        except (HandshakeRefused, OSError) as error:
            if isinstance(error, OSError) and error.errno in EXHAUSTED:
                raise Refusal("resources", f"this prefill node {shortage(error)}") from None
            raise Refusal("transport", f"decode node {hello.node}: {error}") from None
        plan = pair_plan(self._endpoint.layout, hello.layout)
        destinations = destination_ranks(
            self._endpoint.layout, hello.leader or incarnation, hello.layout.tp_size
        )
        peer = Peer(identity, incarnation, hello, memory, plan, destinations)
        self._peers[identity] = peer
        return peer

    def drop(self, peer: Peer) -> None:
        """Detach the peer; every write to it is settled afterwards."""
        peer.lost = True
        if self._peers.get(peer.identity) is peer:
            del self._peers[peer.identity]
        self._endpoint.detach(peer.memory)
