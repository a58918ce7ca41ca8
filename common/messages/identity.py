"""Who speaks: a node's identity as it travels in messages. A name outlives a process, an incarnation does not."""

from __future__ import annotations

import secrets
from typing import Literal

import msgspec

Role = Literal["prefill", "decode"]
NodeState = Literal["loading", "up", "draining"]

MAX_ROOM = 2**63 - 1
ROUTER_NAME = "router"  # of the router's key; no node may be called so


def new_incarnation() -> str:
    """128 random bits in hex: one per process start, so that a message from an earlier life is recognised."""
    return secrets.token_hex(16)


def new_room() -> int:
    """63 random bits: one per attempt of one request. Unguessable, so a peer cannot name a room it was not told of."""
    return secrets.randbits(63) or 1


def routing_id(name: str, incarnation: str, *link: str) -> str:
    """The ZMQ routing id of one socket of one incarnation: NAME/INCARNATION[/LINK].

    The name comes first because a key is bound to it. Two sockets that reach one listener must never share a routing
    id: the later connection would take the route of the earlier one.
    """
    return "/".join((name, incarnation, *link))


class NodeRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where one incarnation of a node is reached by its peers."""

    name: str
    role: Role
    incarnation: str
    peer_address: str = (
        ""  # prefill nodes: the ZMQ address that decode nodes connect to; decode nodes connect, so ""
    )

    @property
    def routing_id(self) -> str:
        """Of its control link to the router."""
        return routing_id(self.name, self.incarnation)


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What placement looks at; sent with every heartbeat."""

    queued: int = 0  # requests not started yet
    queued_tokens: int = 0  # prompt tokens not computed yet (prefill nodes)
    running: int = 0  # requests in a batch
    transferring: int = 0  # requests whose pages are on the way
    free_pages: int = 0
    cached_pages: int = 0  # evictable: held by the prefix cache alone
    quarantined_pages: int = 0
    total_pages: int = 0


class GraphTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one forward of a node that may be captured, and what became of its graphs."""

    phase: str  # prefill, decode, verify ...
    model: str  # target, draft, or draft-0, draft-1 ... for the modules of a multi-layer draft
    replays: int = 0
    fallbacks: dict[str, int] = {}  # reason -> eager runs
    live_tokens: int = 0  # of replays
    padded_tokens: int = 0  # computed in replays and thrown away
    captured: int = 0  # graphs
    unused: int = 0  # graphs of these that no batch has replayed yet


class GraphReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the graphs of one forward at the node's start: a row of the table that it logs."""

    phase: str  # with `model`, as in GraphTotals
    model: str
    backend: str  # none, full, breakable, piecewise
    hidden_mode: str  # of what it returns: NULL, LAST, FULL
    unit: str = ""  # of shapes: tokens, requests, requests of 4 tokens ...
    shapes: tuple[int, ...] = ()  # asked for, ascending; empty: always eager
    captured: int = 0  # graphs: of each shape one per variant
    failed: dict[str, str] = {}  # graph -> why it runs eagerly
    seconds: float = 0.0  # of capture
    mib: float = 0.0  # of memory, in all
    compiler: str = ""  # of piecewise graphs
    compile_seconds: float = 0.0  # before capture
    pieces: int = 0
    reasons: tuple[str, ...] = ()  # why it is off, or has not the backend that was asked for


class NodeCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the node's start; the router federates them under /metrics and /server_info."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    retractions: int = 0
    transfers: int = 0
    transfer_failures: int = 0
    transferred_pages: int = 0
    layered_pages: int = 0  # of these, sent layer by layer while they were computed
    checksum_failures: int = 0
    record_failures: int = 0
    refused_messages: int = 0  # that nobody who keeps the protocol sends
    late_messages: int = 0  # about requests that have ended here, or of processes that were replaced
    spec_drafts: int = 0  # steps of one request that verified drafts
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    avg_spec_accept_length: float = (
        1.0  # tokens per target forward and request; exactly 1 without speculation
    )
    spec_accepted_at: tuple[int, ...] = ()  # how often the first, the second ... draft was accepted
    phase_seconds: dict[str, float] = {}  # parts of a step -> time on the device
    graphs: tuple[GraphTotals, ...] = ()
