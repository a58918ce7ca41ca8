"""Handlers of SGLang's /abort_request and /flush_cache, and of vLLM's routes that do the same."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

import msgspec
from aiohttp import web
from msgspec import Meta

from common.errors import Forbidden, InvalidRequest
from common.observability.logs import Log
from router.dispatch.running_requests import RunningRequests
from router.exchange.host_peers import HostPeers
from router.exchange.orders import MAX_ORDERED, AbortOrder, Identity
from router.http.client import Client, View, client_key
from router.http.errors import clean_request_id
from router.http.request_body import received
from router.requests.json_body import decode_json
from router.routes.status import without_prefix

LOOK_SECONDS = 0.02  # interval at which /flush_cache looks whether the cluster is idle
MAX_WAIT = 60.0  # seconds that /flush_cache may be told to wait
FLUSHED = "Cache flushed: every node empties its prefix cache before its next request.\n"
MAX_ABORTED = MAX_ORDERED // 2  # ids in one request, each of which counts with and without its prefix
BUSY = "Cache not flushed: requests are in flight. Send timeout=SECONDS to wait for them.\n"


class AbortRequest(msgspec.Struct, frozen=True):
    """The body of POST /abort_request."""

    rid: Identity | None = None
    abort_all: bool = False


class AbortRequests(msgspec.Struct, frozen=True):
    """The body of POST /abort_requests."""

    request_ids: Annotated[list[Identity], Meta(min_length=1, max_length=MAX_ABORTED)]


class ActiveRequests(Protocol):
    """The requests in flight, on which these handlers act."""

    @property
    def active(self) -> int:
        """Number of prompts in flight."""
        ...

    @property
    def running(self) -> RunningRequests: ...


_abort = msgspec.json.Decoder(AbortRequest)
_aborts = msgspec.json.Decoder(AbortRequests)


class ControlRoutes:
    """The handlers. Actions on other clients' requests need the right to see the cluster: the scope `admin`."""

    def __init__(
        self, requests: ActiveRequests, flush: Callable[[], list[str]], peers: HostPeers, log: Log
    ) -> None:
        """
        Args:
            requests: those of this router process.
            flush: tells all nodes to empty their caches and returns the names of those that it cannot reach.
            peers: the other processes of this host, on whose requests the handlers act, too.
        """
        self._requests = requests
        self._peers = peers
        self._flush = flush
        self._log = log

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/abort_requests", self.abort_several)
        app.router.add_post("/flush_cache", self.flush_cache)
        app.router.add_post("/reset_prefix_cache", self.reset_cache)

    async def abort(self, request: web.Request) -> web.Response:
        """End requests of the same client. 200 even if there is none with this id, which may just have ended."""
        async with received(request) as memory:
            asked = decode_json(memory.take(), _abort)
        client = request[client_key]
        if asked.abort_all:
            needs_admin(client, "abort_all affects other clients")
            count = self._requests.running.abort_all() + await self._peers.abort(AbortOrder(None))
            self._log.info("aborted all requests", client=client.name, prompts=count)
        elif asked.rid:
            await self._abort(client, [asked.rid])
        else:
            raise InvalidRequest("send the id of a request as rid, or abort_all: true", param="rid")
        return web.Response()

    async def abort_several(self, request: web.Request) -> web.Response:
        """End requests of the same client, as `abort` does."""
        async with received(request) as memory:
            asked = decode_json(memory.take(), _aborts)
        await self._abort(request[client_key], asked.request_ids)
        return web.Response()

    async def _abort(self, client: Client, given: Sequence[str]) -> None:
        # The ids of requests are cleaned in the same way.
        ids = map(clean_request_id, (*given, *map(without_prefix, given)))
        order = AbortOrder(client.name, tuple(ids))
        found = self._requests.running.abort(client.name, order.ids)
        # A request is in one process, and those of a list may be in several.
        if not found or len(given) > 1:
            await self._peers.abort(order)

    async def reset_cache(self, request: web.Request) -> web.Response:
        """Flush the cache as vLLM's clients ask for it. All tiers are emptied, with and without reset_external."""
        if request.query.get("reset_running_requests", "false").lower() not in ("false", "0"):
            raise InvalidRequest(
                "reset_running_requests is not supported: end the requests with POST /abort_request, or send "
                "timeout=SECONDS to wait for them",
                param="reset_running_requests",
            )
        return await self.flush_cache(request)

    async def flush_cache(self, request: web.Request) -> web.Response:
        client = request[client_key]
        needs_admin(client, f"{request.path} affects other clients")
        if not await self._idle_within(_timeout(request)):
            return web.Response(text=BUSY, status=400)
        own = self._flush()
        unreached = sorted({*own, *await self._peers.flush()})
        self._log.info("flushed the prefix caches", client=client.name, unreached=unreached)
        if unreached:
            text = f"These nodes could not be reached, and keep their caches: {', '.join(unreached)}\n"
            return web.Response(text=text, status=503)
        return web.Response(text=FLUSHED)

    async def _idle_within(self, seconds: float) -> bool:
        for _ in range(math.ceil(seconds / LOOK_SECONDS)):
            if not await prompts_in_flight(self._requests, self._peers):
                break
            await asyncio.sleep(LOOK_SECONDS)
        return not await prompts_in_flight(self._requests, self._peers)


async def prompts_in_flight(requests: ActiveRequests, peers: HostPeers) -> int:
    """Return the number of prompts in flight at all router processes of this host."""
    return requests.active + await peers.active()


def needs_admin(client: Client, what: str) -> None:
    """Raise Forbidden if the client may not see the cluster. `what`: the request and how it concerns others."""
    if client.view < View.CLUSTER:
        raise Forbidden(f"{what} and needs an API key with the scope admin")


def _timeout(request: web.Request) -> float:
    given = request.query.get("timeout", "0")
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_WAIT:
        raise InvalidRequest(f"timeout must be a number from 0 to {MAX_WAIT:g}", param="timeout")
    return seconds
