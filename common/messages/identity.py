"""The identity and state of a node in messages. A name outlives a process, an incarnation does not."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, Final, Literal

import msgspec

from common.observability.histogram import Histogram
from common.random_bytes import random_bits

Role = Literal["prefill", "decode"]
ROLES: Final[tuple[Role, Role]] = ("prefill", "decode")
# standby: the half of a movable node whose role the node does not have now; it takes no requests
NodeState = Literal["loading", "up", "draining", "standby"]

MAX_ROOM = 2**63 - 1
ROUTER_NAME = "router"  # name of the router's key; no node may have it


# Bounds of a peer's values: a message that exceeds them is refused when it is decoded. NaN satisfies none of them.
Total = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Finite = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
Label = Annotated[str, msgspec.Meta(max_length=128)]  # becomes a key or a label of a metric
Text = Annotated[str, msgspec.Meta(max_length=8192)]
MANY = msgspec.Meta(max_length=128)  # entries of a list or a map


def new_incarnation() -> str:
    """Return 128 random bits in hex: one value per process, so that messages of an earlier process are recognised."""
    return secrets.token_hex(16)


def rank_incarnation(node: str, rank: int) -> str:
    """Return the incarnation of a rank's process: rank 0 has the node's own, the others one that follows from it."""
    return node if rank == 0 else hashlib.sha256(f"{node}/{rank}".encode()).hexdigest()[:32]


def new_room() -> int:
    """Return 63 random bits, one value per attempt of a request. A peer cannot guess the room of another request."""
    return random_bits(63) or 1


def routing_id(name: str, incarnation: str, *link: str) -> str:
    """Return the ZMQ routing id of one socket of one incarnation: NAME/INCARNATION[/LINK].

    The name comes first because keys are bound to it. Two sockets that connect to one listener must never share a
    routing id: the later connection would take the route of the earlier one.
    """
    return "/".join((name, incarnation, *link))


def name_in(routing_id: bytes) -> str:
    """Return NAME of NAME/INCARNATION[/LINK]; for other routing ids, what precedes the first slash."""
    return routing_id.split(b"/", 1)[0].decode("ascii", errors="replace")


def control_link_id(name: str, incarnation: str, secret: str, purpose: str = "") -> str:
    """Return the routing id of a socket that connects to the router. `purpose` is empty for the control link.

    Whoever knows a routing id can take its route, and nodes know each other's incarnations: only its node and the
    router know `secret`. Tests may leave the secret empty.
    """
    link = "-".join(part for part in (secret, purpose) if part)
    return routing_id(name, incarnation, *([link] if link else []))


class NodeRef(msgspec.Struct, frozen=True, kw_only=True):
    """The address of one incarnation of a node for its peers."""

    name: Label
    role: Role
    incarnation: Label
    # Prefill nodes: the ZMQ address that decode nodes connect to. Decode nodes have none: they connect themselves.
    peer_address: Text = ""


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a node, on which placement is based; sent with every heartbeat."""

    queued: Total = 0  # requests not started yet
    queued_tokens: Total = 0  # prompt tokens not computed yet (prefill nodes)
    queued_ms: Finite = 0.0  # predicted milliseconds until these are computed (prefill nodes)
    # (tokens, predicted milliseconds) of prompts of some lengths, ascending (prefill nodes)
    prompt_times: Annotated[tuple[tuple[Total, Finite], ...], MANY] = ()
    running: Total = 0  # requests in a batch
    retracted: Total = 0  # among `queued`: left the batch for lack of pages (decode nodes)
    transferring: Total = 0  # requests whose pages are being transferred
    free_pages: Total = 0
    cached_pages: Total = 0  # evictable: held only by the prefix cache
    quarantined_pages: Total = 0
    total_pages: Total = 0
    # Tokens of cached prefixes in host memory, and how many fit there.
    host_cached_tokens: Total = 0
    host_total_tokens: Total = 0


class OtherRouters(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of other routers on a node, as its heartbeat to one router reports them; NodeLoad includes them."""

    routers: Total = 0  # others that serve the node now
    requests: Total = 0
    tokens: Total = 0  # of their prompts, not computed yet (prefill nodes)


class BucketTotals(msgspec.Struct, frozen=True, kw_only=True):
    """A histogram since the node's start. Its bounds stand in common.observability.histogram."""

    # By bucket, the infinite one last; empty: nothing is observed.
    counts: Annotated[tuple[Total, ...], MANY] = ()
    sum: Finite = 0.0

    @classmethod
    def of(cls, histogram: Histogram) -> BucketTotals:
        return cls(counts=tuple(histogram.counts), sum=histogram.sum)


class GraphTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of runs of one forward of a node that may be captured, and of its graphs."""

    phase: Label  # prefill, decode, verify ...
    model: Label  # target, draft, or draft-0, draft-1 ... for MTP modules
    replays: Total = 0
    fallbacks: Annotated[dict[Text, Total], MANY] = {}  # reason -> eager runs
    live_tokens: Total = 0  # in replays
    padded_tokens: Total = 0  # computed in replays and discarded
    captured: Total = 0  # graphs
    unused: Total = 0  # captured graphs that no batch has replayed yet


class GraphReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of capturing one forward at the node's start: a row of the table that it logs."""

    phase: Label  # phase and model as in GraphTotals
    model: Label
    backend: Label  # none, full, breakable, piecewise
    hidden_mode: Label  # which hidden states it returns: NULL, LAST, FULL
    unit: Label = ""  # unit of shapes: tokens, requests, requests of 4 tokens ...
    # Requested shapes, ascending; empty: always eager.
    shapes: Annotated[tuple[Total, ...], msgspec.Meta(max_length=4096)] = ()
    captured: Total = 0  # graphs: one per shape and variant
    failed: dict[str, str] = {}  # graph -> why it runs eagerly
    seconds: Finite = 0.0  # spent on capture
    mib: Finite = 0.0  # total memory
    compiler: Label = ""  # compiler of piecewise graphs
    compile_seconds: Finite = 0.0  # spent before capture
    pieces: Total = 0
    reasons: tuple[str, ...] = ()  # why graphs are off, or use another backend than requested


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one rank of a node, at the node's start."""

    device: Label
    pages: Total  # the same on all ranks: as many as fit on the one with the least room
    pool_bytes: Total = 0  # of its share of these pages
    memory_bytes: Total = 0  # of the device, taken by the process; on a CPU its resident memory


class RankTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of one rank of a node that has several."""

    plans: Total = 0  # applied
    behind: Total = 0  # plans that rank 0 has sent and this rank has not applied yet
    collective_wait_seconds: Finite = 0.0  # in which its host has waited for the other ranks


class NodeCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the node's start; the router exports them under /metrics and /server_info."""

    requests: Total = 0
    prompt_tokens: Total = 0
    cached_tokens: Total = 0
    generated_tokens: Total = 0
    steps: Total = 0
    # Prefill nodes: device seconds of forwards, and what the node predicted for the same ones.
    forward_seconds: Finite = 0.0
    predicted_forward_seconds: Finite = 0.0
    late_launches: Total = 0  # steps before which the device had run out of work
    missing_marks: Total = 0  # steps that ended without writing their progress marks
    retractions: Total = 0
    # TOKEN_SECONDS: gaps between the outputs of a request (decode nodes).
    inter_token: BucketTotals = BucketTotals()
    # STEP_TOKENS: tokens that one forward computes or one step draws.
    step_tokens: BucketTotals = BucketTotals()
    transfers: Total = 0
    transfer_failures: Total = 0
    # Causes of transfers that a node ended because of time: handshake, slots, first_page, stall, deadline ...
    transfer_timeouts: Annotated[dict[Label, Total], MANY] = {}
    transfer_bytes: BucketTotals = BucketTotals()  # TRANSFER_BYTES: per request handed over (prefill nodes)
    quarantined_transfers: Total = 0  # their pages had to wait until nothing could be written to them
    duplicate_messages: Total = 0  # repeated announcements of peers, which were dropped
    abort_retries: Total = 0  # repeated requests to a peer to stop writing
    transferred_pages: Total = 0
    layered_pages: Total = 0  # among transferred_pages: sent layer by layer while being computed
    checksum_failures: Total = 0
    record_failures: Total = 0
    refused_messages: Total = 0  # peers that follow the protocol never cause any
    unsent_messages: Total = 0  # dropped: too many waited for a router or node, or it had gone
    late_messages: Total = 0  # about requests that have ended, or from processes that were replaced
    spec_drafts: Total = 0  # steps that verified drafts, counted per request
    spec_draft_tokens: Total = 0
    spec_accepted_tokens: Total = 0
    spec_forced_tokens: Total = 0  # forced and verified as drafts, and not among the draft tokens
    spec_accepted_forced: Total = 0
    # Emitted tokens per target forward and request; exactly 1 without speculation and grammars.
    avg_spec_accept_length: Finite = 1.0
    # The same, including accepted tokens that max_tokens or a stop token cut off.
    avg_spec_verified_length: Finite = 1.0
    # How often the first, the second ... draft was accepted.
    spec_accepted_at: Annotated[tuple[Total, ...], MANY] = ()
    # Prefill nodes: prefixes in host memory.
    host_queries: Total = 0  # prompt tokens that the device's prefix cache lacked
    host_hits: Total = 0  # among them: copied from host memory
    host_loads: Total = 0  # prompts for which something was copied from there
    host_loaded_bytes: Total = 0
    host_stores: Total = 0  # prompts of which something was copied to there
    host_stored_bytes: Total = 0
    host_evicted_tokens: Total = 0  # replaced by others
    host_checksum_failures: Total = 0  # blocks and states that had changed there, and were computed again
    kv_events_dropped: Total = 0  # changes of prefix caches that were not published
    kv_events_failures: Total = 0  # defects after which publishing them began again
    kv_events_problem: Text = ""  # why none are published now
    phase_seconds: Annotated[dict[Label, Finite], MANY] = {}  # parts of a step -> time on the device
    graphs: Annotated[tuple[GraphTotals, ...], MANY] = ()
    ranks: Annotated[tuple[RankTotals, ...], MANY] = ()  # in their order; empty for a node of one rank
