"""The router without HTTP: the control socket, the nodes, and the dispatcher that runs requests on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.messages.node_inbox import FlushCache
from router.control_plane import ControlPlane
from router.dispatch.attempt_messages import AttemptMessages
from router.dispatch.dispatcher import Dispatcher
from router.metrics.cluster_throughput import ClusterThroughput
from router.metrics.router_metrics import RouterMetrics
from router.nodes.draining_decode import DrainingDecode
from router.nodes.event_reader import EventReader
from router.nodes.health import NodeHealth
from router.nodes.operator_orders import OperatorOrders
from router.nodes.outbox import Outbox, SendAll
from router.nodes.placer import Placer
from router.nodes.profiles import NodeProfiles
from router.nodes.registry import Node, NodeRegistry
from router.nodes.return_watch import ReturnWatch
from router.nodes.role_changes import RoleChanges
from router.parts import ControlLink, Dispatching, NodeRules, Observation


@dataclass(frozen=True, slots=True)
class Core:
    """The control socket is bound; messages of nodes are read after `start`."""

    control: ControlPlane
    registry: NodeRegistry
    dispatcher: Dispatcher
    placer: Placer
    metrics: RouterMetrics
    throughput: ClusterThroughput
    events: EventReader
    orders: OperatorOrders

    def start(self) -> None:
        """Read the messages of nodes, on the running event loop."""
        attempts = AttemptMessages(self.dispatcher, self.control.rules)
        self.control.start(self.registry, attempts, self.orders, self.throughput.log_if_due)
        self.events.start()

    def close(self) -> None:
        """Close the sockets to nodes."""
        self.events.close()
        self.control.close()

    def flush_caches(self) -> list[str]:
        """Tell all nodes to empty their prefix caches; return the names of those that it cannot reach.

        Messages of a node arrive in order, so requests that are placed afterwards find empty caches.
        """
        self.placer.history.flushed()
        return [node.name for node in self.registry if not self.control.send(node.routing_id, FlushCache())]


def assemble_core(
    link: ControlLink,
    nodes: NodeRules,
    dispatching: Dispatching,
    observation: Observation,
    wrap: Callable[[SendAll], SendAll] = lambda send_all: send_all,
) -> Core:
    """Bind the control socket and compose what runs requests.

    Args:
        wrap: returns what sends messages about requests to nodes; by default the control socket itself.
    """
    log, clock = observation.log, observation.clock
    control = ControlPlane(
        link.context,
        link.address,
        link.incarnation,
        link.security,
        log,
        link.queued_bytes,
        nodes.registration,
    )

    send_all = wrap(control.send_all)

    def on_lost(node: Node, reason: str) -> None:
        dispatcher.node_lost(node, reason)
        control.announce_loss(node)
        orders.lost(node)

    def on_change() -> None:
        dispatcher.nodes_changed()
        draining.nodes_changed()

    registry = NodeRegistry(
        nodes.fingerprint,
        nodes.node_timeout,
        nodes.loop_timeout,
        clock,
        log,
        on_lost,
        on_change,
        ReturnWatch(nodes.configured, nodes.return_window, clock),
    )
    draining = DrainingDecode(registry, Outbox(send_all).post)
    orders = OperatorOrders(
        NodeProfiles(registry, control.send), RoleChanges(registry, control.send, clock, log)
    )
    health = NodeHealth(nodes.slow_start, clock)
    metrics = RouterMetrics(
        observation.model,
        lambda: registry,
        lambda: control.refused_messages,
        health.conditions,
        observation.max_model_len,
        observation.traces.finished,
        nodes.configured,
    )
    placer = Placer(registry, dispatching.policies, health, dispatching.rng, dispatching.placement)
    dispatcher = Dispatcher(
        registry,
        placer,
        send_all,
        dispatching.limits,
        metrics,
        log,
        health,
        observation.events,
    )
    throughput = ClusterThroughput(log, clock, registry, lambda: metrics.placement.waiting)
    reported, block_tokens = placer.history.reported, dispatching.placement.block_tokens
    gaps = metrics.placement.event_gaps.inc
    events = EventReader(registry, nodes.registration, reported, block_tokens, clock, log, gaps)
    return Core(control, registry, dispatcher, placer, metrics, throughput, events, orders)
