"""Composes a router from its parts. build.py makes the parts from a config, tests make their own."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from router.api_routes import ApiRoutes
from router.app import RouterApp
from router.availability import Availability
from router.core import assemble_core
from router.exchange.host_peers import HostPeers
from router.exchange.host_routes import HostRoutes
from router.metrics.http_metrics import HttpMetrics
from router.nodes.pool_load import pool_load
from router.parts import ApiParts, ChildProcesses, ControlLink, Dispatching, NodeRules, Observation
from router.requests.checks import ServedModel
from router.routes.admin import AdminRoutes
from router.routes.profile import ProfileRoutes
from router.routes.roles import RoleRoutes
from router.routes.status import ClusterView
from router.server.listeners import HttpListeners, HttpPlan
from router.server_info import ServerInfo


def assemble(
    link: ControlLink,
    nodes: NodeRules,
    dispatching: Dispatching,
    observation: Observation,
    model: ServedModel,
    children: ChildProcesses,
    api: ApiParts,
    http: HttpPlan,
) -> RouterApp:
    """Compose a router that has not started. Its control socket is bound."""
    log = observation.log
    core = assemble_core(link, nodes, dispatching, observation)
    dispatcher = core.dispatcher
    availability = Availability(model, core, nodes.configured, log)

    def latest(count: int, client: str | None) -> list[dict[str, Any]]:
        return dispatcher.timelines.latest(count, client, observation.clock())

    view = ClusterView(
        availability.not_ready,
        availability.missing_nodes,
        ServerInfo(core, availability, observation.config, link.incarnation),
        core.metrics.render,
        dispatcher.timelines.get,
        latest,
        lambda: pool_load(core.registry),
    )
    peers = HostPeers(http.name, http.peers, log)
    routes = ApiRoutes(api, availability, dispatcher, dispatcher, core.flush_caches, view, peers, log)
    admin = AdminRoutes(availability.set_paused, lambda: routes.active, peers)
    roles = RoleRoutes(core.orders.roles, http.name, dispatching.drain_timeout)
    host = HostRoutes(
        http.name,
        core.metrics.render,
        dispatcher.timelines.get,
        latest,
        dispatcher.running,
        availability.set_paused,
        lambda: routes.active,
        core.flush_caches,
    )
    answers = HttpMetrics(core.metrics.registry)

    def add_routes(app: web.Application) -> None:
        routes.add_to(app)
        observation.traces.add_to(app)

    profiles = ProfileRoutes(http.name, http.peers, observation.profiles, core.orders.profiles)

    def add_admin_routes(app: web.Application) -> None:
        admin.add_to(app)
        roles.add_to(app)
        profiles.add_to(app)

    listeners = HttpListeners(http, add_routes, add_admin_routes, host.add_to, log, answers.answered)
    return RouterApp(
        core, availability, routes, listeners, children, link, observation, dispatching.drain_timeout
    )
