"""Handlers of vLLM's /load, and of SGLang's /v1/loads and its former name /get_load."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from time import perf_counter

import msgspec
from aiohttp import web

from common.errors import InvalidRequest
from router.exchange.host_peers import HostPeers
from router.http.client import View, client_key
from router.http.errors import json_response
from router.nodes.pool_load import PoolLoad
from router.routes.control import ActiveRequests, needs_admin, prompts_in_flight
from router.routes.status import VERSION


class ServerLoad(msgspec.Struct, frozen=True):
    """The answer of GET /load."""

    server_load: int  # prompts in flight


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cluster, as SGLang describes one rank of a server."""

    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    token_usage: float


class LoadSums(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks together, as earlier versions of SGLang show them."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    total_used_tokens: int
    total_tokens: int
    avg_token_usage: float


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /v1/loads."""

    timestamp: str
    version: str
    dp_rank_count: int = 1
    loads: tuple[RankLoad, ...]
    aggregate: LoadSums


class FormerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """An element of the answer of GET /get_load."""

    dp_rank: int = 0
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    num_pending_tokens: int
    ts_tic: float


class LoadRoutes:
    """The handlers. Only clients that may see the cluster see its load."""

    def __init__(self, requests: ActiveRequests, pools: Callable[[], PoolLoad], peers: HostPeers) -> None:
        """`requests`: those of this router process; `peers`: the other processes of this host."""
        self._requests = requests
        self._pools = pools
        self._peers = peers

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/load", self.load)
        app.router.add_get("/v1/loads", self.loads)
        app.router.add_get("/get_load", self.former_load)

    async def load(self, request: web.Request) -> web.Response:
        """Answer with the load of the cluster, or with the client's own where it may not see the cluster."""
        client = request[client_key]
        if client.view >= View.CLUSTER:
            return json_response(ServerLoad(await prompts_in_flight(self._requests, self._peers)))
        own = self._requests.running.count(client.name)
        return json_response(ServerLoad(own + await self._peers.active(client.name)))

    async def loads(self, request: web.Request) -> web.Response:
        if request.query.get("format", "json") != "json":
            raise InvalidRequest(
                "the format must be json; /metrics has series for Prometheus", param="format"
            )
        if request.query.get("dp_rank", "0") != "0":
            raise InvalidRequest("the cluster is one rank; dp_rank must be 0", param="dp_rank")
        rank = await self._rank(request)
        sums = LoadSums(
            total_running_reqs=rank.num_running_reqs,
            total_waiting_reqs=rank.num_waiting_reqs,
            total_reqs=rank.num_running_reqs + rank.num_waiting_reqs,
            total_used_tokens=rank.num_used_tokens,
            total_tokens=rank.num_total_tokens,
            avg_token_usage=rank.token_usage,
        )
        now = datetime.now(UTC).isoformat()
        return json_response(Loads(timestamp=now, version=VERSION, loads=(rank,), aggregate=sums))

    async def former_load(self, request: web.Request) -> web.Response:
        rank = await self._rank(request)
        former = FormerLoad(
            num_reqs=rank.num_running_reqs + rank.num_waiting_reqs,
            num_waiting_reqs=rank.num_waiting_reqs,
            num_tokens=rank.num_total_tokens,
            num_pending_tokens=rank.num_total_tokens - rank.num_used_tokens,
            ts_tic=perf_counter(),
        )
        return json_response([former])

    async def _rank(self, request: web.Request) -> RankLoad:
        needs_admin(request[client_key], f"{request.path} shows other clients' load")
        active, pools = await prompts_in_flight(self._requests, self._peers), self._pools()
        return RankLoad(
            num_running_reqs=pools.running,
            num_waiting_reqs=max(0, active - pools.running),
            num_used_tokens=pools.used,
            num_total_tokens=pools.used + pools.prompts,
            max_total_num_tokens=pools.total,
            token_usage=round(pools.used / pools.total, 4) if pools.total else 0.0,
        )
