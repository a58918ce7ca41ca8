"""Composition root: config to objects. Below this file nobody sees a config."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
import zmq

from common.config import Cluster, DecodeNode, Resolved
from common.config.run_directory import control_address
from common.config.transport_choice import choose_transport
from common.engine.attention.paged import PagedAttention
from common.engine.kv_cache.relay_state import RelayState
from common.engine.kv_cache.request_table import RequestTable
from common.engine.model_runner import ModelRunner, make_pool
from common.engine.overlap import completion_for
from common.engine.serving_model import load_serving_model, page_space
from common.ipc import LinkSecurity, check_bind, link_security
from common.ipc.router_link import RouterLink
from common.messages import decode_inbox
from common.messages.identity import NodeRef, new_incarnation
from common.messages.router_inbox import Register
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from decode_node import node as decode
from decode_node.peers import PeerConnections
from decode_node.retraction import Retraction
from decode_node.step import AutoregressiveStep
from kv_transfer.from_config import kv_layout, transfer_limits
from kv_transfer.limits import MIB, TransferLimits
from kv_transfer.receiver import Receiver
from kv_transfer.transport.base import ReceiverEndpoint, Region
from kv_transfer.transport.shm import ShmReceiver, sweep_orphans
from kv_transfer.transport.tcp import TcpReceiver


@dataclass(slots=True)
class BuiltDecodeNode:
    """A node and what has to be closed behind it."""

    node: decode.DecodeNode
    link: RouterLink[decode_inbox.DecodeMessage]
    peers: PeerConnections
    receiver: Receiver
    security: LinkSecurity
    context: zmq.Context[zmq.Socket[bytes]]

    def start(self) -> None:
        self.link.start()

    def run(self) -> None:
        self.node.run()

    def drain(self) -> None:
        self.node.drain()

    def close(self) -> None:
        self.receiver.shutdown()
        self.link.close()
        self.peers.close()
        self.security.close()
        self.context.term()


def build(resolved: Resolved, name: str, reporter: StartupReporter, log: Log) -> BuiltDecodeNode:
    """Load, allocate, connect. Raises ConfigError or ModelError with the remedy."""
    cluster = resolved.cluster
    section, own = cluster.decode, cluster.decode_node(name)
    served = load_serving_model(
        resolved.model_path, cluster, own.device, section.pool_tokens, "decode.pool_tokens", reporter
    )
    reporter.report("allocating")
    device = served.placement.device
    incarnation = new_incarnation()
    layout = kv_layout(cluster, served.fingerprint, served.dtype_name, served.num_pages, served.kv_shapes)
    limits = transfer_limits(cluster, served.max_model_len)
    context = zmq.Context[zmq.Socket[bytes]]()
    security = link_security(context, resolved.keys_path, name)
    endpoint = _endpoint(cluster, own, incarnation, limits, security)
    storage = torch.frombuffer(endpoint.allocate(Region.KV, layout.total_bytes), dtype=torch.uint8)
    pool = make_pool(
        served.config,
        cluster.kv.page_size,
        served.num_pages,
        served.placement,
        storage=storage,
        plane_offsets=[plane.offset for plane in layout.planes],
    )
    record_slots = 2 * section.max_transferring  # on the way, and as many again in quarantine
    receiver = Receiver(incarnation, name, endpoint, layout, time.monotonic, limits, record_slots)
    poller = zmq.Poller()
    space = page_space(cluster, served.num_pages, section.prefix_cache)
    rows = section.max_running
    table = RequestTable(rows, space.pages_for(served.max_model_len), device)
    relay = RelayState.allocate(rows, device)
    step = AutoregressiveStep(
        ModelRunner(served.model, pool, PagedAttention(pool, served.config.sliding_windows)),
        table,
        relay,
        cluster.kv.page_size,
        device,
        completion_for(device, one_behind=section.read_results == "one_behind"),
    )
    link = RouterLink(
        context,
        control_address(resolved),
        Register(
            node=NodeRef(name=name, role="decode", incarnation=incarnation),
            host=os.uname().nodename,
            pid=os.getpid(),
            model_fingerprint=served.fingerprint,
            max_model_len=served.max_model_len,
            page_size=cluster.kv.page_size,
            total_pages=served.num_pages - 1,
            effective_config=served.describe(layout.total_bytes, choose_transport(cluster)),
        ),
        decode_inbox.codec,
        cluster.health.heartbeat_interval,
        cluster.health.router_timeout,
        log,
        security=security,
    )
    peers = PeerConnections(context, incarnation, receiver, poller, security)
    node = decode.DecodeNode(
        incarnation,
        link,
        peers,
        poller,
        receiver,
        space,
        table,
        Retraction(pool, space, table, relay, section.backup_mib * MIB),
        step,
        decode.DecodeLimits(
            max_running=section.max_running,
            max_transferring=section.max_transferring,
            max_queue=section.max_queue,
            max_model_len=served.max_model_len,
            reserved_tokens=section.reserved_tokens,
            skip_ahead=section.skip_ahead,
            drain_timeout=cluster.health.drain_timeout,
        ),
        log,
    )
    return BuiltDecodeNode(node, link, peers, receiver, security, context)


def _endpoint(
    cluster: Cluster, own: DecodeNode, incarnation: str, limits: TransferLimits, security: LinkSecurity
) -> ReceiverEndpoint:
    if choose_transport(cluster) == "shm":
        sweep_orphans()
        return ShmReceiver(incarnation)
    check_bind(f"tcp://{own.host}:{own.bulk_port}", f"decode.nodes[{own.name}].host", security)
    return TcpReceiver(own.host, own.bulk_port, limits)
