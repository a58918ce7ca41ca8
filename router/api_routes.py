"""All routes of the HTTP API. The listeners for operators have them, too."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from common.observability.logs import Log
from router.availability import ServedModels
from router.dispatch.generation import Generator
from router.exchange.host_peers import HostPeers
from router.openapi.routes import OpenApiRoutes
from router.page.routes import PageRoutes
from router.parts import ApiParts
from router.routes.control import ActiveRequests, ControlRoutes
from router.routes.loads import LoadRoutes
from router.routes.messages import MessagesRoutes
from router.routes.native import NativeRoutes
from router.routes.openai import OpenAiRoutes
from router.routes.responses import ResponsesRoutes
from router.routes.status import VERSION, ClusterView, StatusRoutes
from router.routes.tokenizer import TokenizerRoutes
from router.text.chat_prompts import ChatPrompts


class ApiRoutes:
    """The handlers of the API."""

    def __init__(
        self,
        parts: ApiParts,
        models: ServedModels,
        generator: Generator,
        cluster: ActiveRequests,
        flush: Callable[[], list[str]],
        view: ClusterView,
        peers: HostPeers,
        log: Log,
    ) -> None:
        """
        Args:
            generator: runs requests.
            cluster: what the control routes act on, and the load counts.
            flush: empties all prefix caches, and returns the names of the nodes that it cannot reach.
            view: what the routes show that only read.
            peers: the other router processes of this host.
        """
        texts, tokenizer, images, served = parts.texts, parts.tokenizer, parts.images, models.served
        self._openai = openai = OpenAiRoutes(
            generator,
            tokenizer,
            texts,
            models.admitting,
            images,
            parts.max_requests,
            log,
        )
        prompts = ChatPrompts(texts, images)
        self._routes = (
            openai,
            NativeRoutes(openai, texts, tokenizer, models.admitting),
            ResponsesRoutes(openai, texts, prompts, models.admitting),
            MessagesRoutes(openai, texts, prompts, models.admitting),
            OpenApiRoutes(VERSION),
            PageRoutes(),
            StatusRoutes(view, served, peers),
            TokenizerRoutes(texts, served, parts.tokenizer_info),
            ControlRoutes(cluster, flush, peers, log),
            LoadRoutes(cluster, view.load, peers),
        )

    @property
    def active(self) -> int:
        """Number of requests in progress, from reading their texts and images to the end of the answer."""
        return self._openai.active

    def add_to(self, app: web.Application) -> None:
        for routes in self._routes:
            routes.add_to(app)
