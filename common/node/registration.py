"""Builds the registration, with which a serving process describes itself to the router."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from common.engine.graphs import node_graphs
from common.engine.graphs.node_graphs import NodeGraphs
from common.messages.identity import NodeRef, RankReport
from common.messages.protocol import CONTROL_PROTOCOL_VERSION
from common.messages.router_inbox import ConfigValue, Register
from common.node.serving_model import ServingModel
from common.node_plan import NodePlan


def registration(
    plan: NodePlan,
    node: NodeRef,
    link_secret: str,
    served: ServingModel,
    graphs: Sequence[NodeGraphs[Any]],
    ranks: Sequence[RankReport],
    times: Mapping[str, ConfigValue],
) -> Register:
    """Return the message. `graphs` are captured: it includes their reports.

    Args:
        link_secret: random; see control_link_id.
        ranks: of all ranks, in their order.
        times: of the start-up until now, as fields of /server_info.
    """
    return Register(
        protocol_version=CONTROL_PROTOCOL_VERSION,
        node=node,
        link_secret=link_secret,
        host=os.uname().nodename,
        pid=os.getpid(),
        model_fingerprint=served.fingerprint,
        max_model_len=served.max_model_len,
        page_size=plan.page_size,
        total_pages=served.num_pages - 1,
        effective_config={
            **served.describe(served.layout.total_bytes, plan.transfer.transport, plan.max_rows),
            "transfer_layers": plan.transfer.layers,
            "tensor_parallel": len(plan.devices),
            "expert_parallel": plan.expert_parallel,
            "devices": ", ".join(plan.devices),
            **_event_sockets(plan),
            **times,
        },
        graphs=tuple(node_graphs.report(each) for each in graphs),
        ranks=tuple(ranks),
    )


def _event_sockets(plan: NodePlan) -> dict[str, str | int]:
    """Return where the node publishes KV events, if it does."""
    events = plan.kv_events
    if events is None:
        return {}
    return {
        "kv_events": events.address,
        "kv_events_replay": events.replay_address,
        "kv_events_topic": events.topic,
        "kv_events_block_tokens": events.block_tokens,
    }
