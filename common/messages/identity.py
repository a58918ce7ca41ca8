"""Who speaks: a node's identity as it travels in messages. A name outlives a process, an incarnation does not."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

import msgspec

Role = Literal["prefill", "decode"]
NodeState = Literal["loading", "up", "draining"]

MAX_ROOM = 2**63 - 1
ROUTER_NAME = "router"  # of the router's key; no node may be called so


# Bounds of what a peer may say: a message beyond them is refused when it is decoded. NaN satisfies none of them.
Total = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Finite = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
Label = Annotated[str, msgspec.Meta(max_length=128)]  # becomes a key or a label of a metric
Text = Annotated[str, msgspec.Meta(max_length=8192)]
MANY = msgspec.Meta(max_length=128)  # entries of a list or a map


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


def control_link_id(name: str, incarnation: str, secret: str, purpose: str = "") -> str:
    """The routing id of a socket that connects to the router. `purpose`: what else than the control link it is.

    Who knows a routing id can take its route, and nodes know each other's incarnations: `secret` is known to its node
    and the router only. Without a secret (in tests) it is left out.
    """
    link = "-".join(part for part in (secret, purpose) if part)
    return routing_id(name, incarnation, *([link] if link else []))


class NodeRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where one incarnation of a node is reached by its peers."""

    name: Label
    role: Role
    incarnation: Label
    # Prefill nodes: the ZMQ address that decode nodes connect to; decode nodes connect, so "".
    peer_address: Text = ""


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What placement looks at; sent with every heartbeat."""

    queued: Total = 0  # requests not started yet
    queued_tokens: Total = 0  # prompt tokens not computed yet (prefill nodes)
    running: Total = 0  # requests in a batch
    transferring: Total = 0  # requests whose pages are on the way
    free_pages: Total = 0
    cached_pages: Total = 0  # evictable: held by the prefix cache alone
    quarantined_pages: Total = 0
    total_pages: Total = 0


class GraphTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one forward of a node that may be captured, and what became of its graphs."""

    phase: Label  # prefill, decode, verify ...
    model: Label  # target, draft, or draft-0, draft-1 ... for the modules of a multi-layer draft
    replays: Total = 0
    fallbacks: Annotated[dict[Text, Total], MANY] = {}  # reason -> eager runs
    live_tokens: Total = 0  # of replays
    padded_tokens: Total = 0  # computed in replays and thrown away
    captured: Total = 0  # graphs
    unused: Total = 0  # graphs of these that no batch has replayed yet


class GraphReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the graphs of one forward at the node's start: a row of the table that it logs."""

    phase: Label  # with `model`, as in GraphTotals
    model: Label
    backend: Label  # none, full, breakable, piecewise
    hidden_mode: Label  # of what it returns: NULL, LAST, FULL
    unit: Label = ""  # of shapes: tokens, requests, requests of 4 tokens ...
    # asked for, ascending; empty: always eager
    shapes: Annotated[tuple[Total, ...], msgspec.Meta(max_length=4096)] = ()
    captured: Total = 0  # graphs: of each shape one per variant
    failed: dict[str, str] = {}  # graph -> why it runs eagerly
    seconds: Finite = 0.0  # of capture
    mib: Finite = 0.0  # of memory, in all
    compiler: Label = ""  # of piecewise graphs
    compile_seconds: Finite = 0.0  # before capture
    pieces: Total = 0
    reasons: tuple[str, ...] = ()  # why it is off, or has not the backend that was asked for


class NodeCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the node's start; the router federates them under /metrics and /server_info."""

    requests: Total = 0
    prompt_tokens: Total = 0
    cached_tokens: Total = 0
    generated_tokens: Total = 0
    steps: Total = 0
    retractions: Total = 0
    transfers: Total = 0
    transfer_failures: Total = 0
    transferred_pages: Total = 0
    layered_pages: Total = 0  # of these, sent layer by layer while they were computed
    checksum_failures: Total = 0
    record_failures: Total = 0
    refused_messages: Total = 0  # that nobody who keeps the protocol sends
    late_messages: Total = 0  # about requests that have ended here, or of processes that were replaced
    spec_drafts: Total = 0  # steps of one request that verified drafts
    spec_draft_tokens: Total = 0
    spec_accepted_tokens: Total = 0
    # emitted tokens per target forward and request; exactly 1 without speculation
    avg_spec_accept_length: Finite = 1.0
    # as above, with tokens that verification accepted and that max_tokens or a stop token cut off
    avg_spec_verified_length: Finite = 1.0
    # how often the first, the second ... draft was accepted
    spec_accepted_at: Annotated[tuple[Total, ...], MANY] = ()
    phase_seconds: Annotated[dict[Label, Finite], MANY] = {}  # parts of a step -> time on the device
    graphs: Annotated[tuple[GraphTotals, ...], MANY] = ()
