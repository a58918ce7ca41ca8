"""Handlers of the routes that only read: health, readiness, models, metrics, server info, timelines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from aiohttp import web

from common.errors import InvalidRequest
from router.answers.openai_responses import CHAT_ID, COMPLETION_ID
from router.apis.messages_answer import MESSAGE_ID
from router.apis.responses_answer import RESPONSE_ID
from router.apis.tokens_answer import TOKENS_ID
from router.exchange.host_peers import HostPeers
from router.http.client import View, client_key
from router.http.errors import error_body, json_response
from router.http.matched_route import HEALTH, LIVE, READY
from router.nodes.pool_load import PoolLoad
from router.requests.checks import ServedModel, check_name

VERSION = "0.1.0"
DEFAULT_LISTED, MAX_LISTED = 40, 200  # timelines in one answer of /requests: by default, and at most
ANSWER_PREFIXES = (CHAT_ID, COMPLETION_ID, RESPONSE_ID, MESSAGE_ID, TOKENS_ID)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Functions that return the current state of the cluster."""

    ready: Callable[[], str | None]  # None if requests can be served, otherwise the reason
    missing_nodes: Callable[[], list[dict[str, str]]]  # name and role of configured nodes that are not up
    server_info: Callable[[View], dict[str, Any]]
    # from the header Accept: series and their media type
    metrics: Callable[[str], Awaitable[tuple[bytes, str]]]
    timeline: Callable[[str], dict[str, Any] | None]
    # The last requests, newest first: how many at most, and of which client (None: of all).
    timelines: Callable[[int, str | None], list[dict[str, Any]]]
    load: Callable[[], PoolLoad]


class StatusRoutes:
    """The handlers. Liveness: the event loop responds. Readiness: a request could be served now."""

    def __init__(self, view: ClusterView, model: Callable[[], ServedModel], peers: HostPeers) -> None:
        """`peers`: the other router processes of this host, for which this one answers, too."""
        self._view = view
        self._model = model
        self._peers = peers

    def add_to(self, app: web.Application) -> None:
        for path in LIVE:
            app.router.add_get(path, self.live)
        for path in HEALTH:
            app.router.add_get(path, self.health)
        for path in READY:
            app.router.add_get(path, self.ready)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self.server_info)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self.model_info)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{id:.+}", self.model)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/version", self.version)
        app.router.add_get("/requests", self.timelines)
        app.router.add_get("/requests/{id:.+}", self.timeline)

    async def live(self, request: web.Request) -> web.Response:
        return web.Response()

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200 or 503 with an empty body, as vLLM does."""
        return web.Response(status=200 if self._view.ready() is None else 503)

    async def ready(self, request: web.Request) -> web.Response:
        """Answer 200 while requests are served ("degraded" if configured nodes are missing), else 503 and why."""
        reason, missing = self._view.ready(), self._view.missing_nodes()
        answer: dict[str, Any] = {"status": "ready" if reason is None else "not ready"}
        if reason is None and missing:
            answer["status"] = "degraded"
        if request[client_key].view >= View.CLUSTER:  # other clients must not see node names
            if reason is not None:
                answer["reason"] = reason
            if reason is not None or missing:
                answer["missing"] = missing
        return json_response(answer, 200 if reason is None else 503)

    async def server_info(self, request: web.Request) -> web.Response:
        return json_response({"version": VERSION, **self._view.server_info(request[client_key].view)})

    async def model_info(self, request: web.Request) -> web.Response:
        """Answer with the fields of SGLang that clients read, and the context length."""
        model = self._model()
        path = _path(model, request)
        return json_response(
            {
                "model_path": path,
                "served_model_name": model.name,
                "tokenizer_path": path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "has_image_understanding": model.vision is not None,
                "has_audio_understanding": False,
                "max_model_len": model.max_model_len,
            }
        )

    async def models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [_card(self._model(), request)]})

    async def model(self, request: web.Request) -> web.Response:
        model = self._model()
        check_name(request.match_info["id"], (model.name,))
        return json_response(_card(model, request))

    async def metrics(self, request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")
        series, media = await self._view.metrics(accept)
        return web.Response(body=await self._peers.metrics(series, accept), headers={"Content-Type": media})

    async def version(self, request: web.Request) -> web.Response:
        return json_response({"version": VERSION})

    async def timeline(self, request: web.Request) -> web.Response:
        """Look up a timeline by the request id or by the id of its answer: here, then at the other processes."""
        identity, client = request.match_info["id"], request[client_key]
        own, others, plain = self._view.timeline, self._peers.timeline, without_prefix(identity)
        found = own(identity) or own(plain) or await others(identity) or await others(plain)
        if found is None or (client.view < View.CLUSTER and found["client"] != client.name):
            body = error_body("no recent request has this id", "invalid_request_error", "id", 404)
            return json_response(body, 404)
        return json_response(found)

    async def timelines(self, request: web.Request) -> web.Response:
        """Answer with the timelines of the last requests of all processes of this host, newest first.

        They are those of all clients, or of the client that may not see the others'.
        """
        client = request[client_key]
        of = None if client.view >= View.CLUSTER else client.name
        count = _limit(request)
        found = self._view.timelines(count, of) + await self._peers.latest(count, of)
        return json_response({"requests": sorted(found, key=itemgetter("age"))[:count]})


def without_prefix(identity: str) -> str:
    """Return the request id in the id of an answer; other ids are returned unchanged."""
    prefix = next((each for each in ANSWER_PREFIXES if identity.startswith(each)), "")
    return identity.removeprefix(prefix)


def _limit(request: web.Request) -> int:
    """Return the number of requests that the client asks for. Raises InvalidRequest."""
    given = request.query.get("limit", str(DEFAULT_LISTED))
    count = int(given) if given.isascii() and given.isdigit() and len(given) <= 9 else 0
    if not 1 <= count <= MAX_LISTED:
        raise InvalidRequest(f"limit must be a number from 1 to {MAX_LISTED}", param="limit")
    return count


def _path(model: ServedModel, request: web.Request) -> str:
    """Return the model's directory for clients that may see the cluster, otherwise its name."""
    return model.path if request[client_key].view >= View.CLUSTER else model.name


def _card(model: ServedModel, request: web.Request) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "tandem",
        "root": _path(model, request),
        "max_model_len": model.max_model_len,
    }
