"""Builds /server_info for each view of the cluster. Process ids, hosts and incarnations are for operators only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from router.availability import Availability
from router.core import Core
from router.http.client import View
from router.nodes.health import Condition
from router.nodes.registry import Node
from router.requests.checks import ServedModel
from router.requests.openai_schema import ChatRequest, CompletionRequest, supported_fields

PARAMETERS = {
    "/v1/chat/completions": supported_fields(ChatRequest),
    "/v1/completions": supported_fields(CompletionRequest),
}


class ServerInfo:
    """Answers /server_info. `config`: every key of the configuration with its value and origin."""

    def __init__(
        self, core: Core, availability: Availability, config: Mapping[str, Any], incarnation: str
    ) -> None:
        self._core = core
        self._availability = availability
        self._config = config
        self._incarnation = incarnation

    def __call__(self, view: View) -> dict[str, Any]:
        served, core = self._availability.served(), self._core
        info = of_service(served, self._availability.not_ready() is None, core.registry)
        if view >= View.CLUSTER:
            info |= {
                "model_path": served.path,
                "missing_nodes": self._availability.missing_nodes(),
                "active_requests": core.dispatcher.active,
                "refused_messages": core.control.refused_messages,
                "config": self._config,
                **of_nodes(core.dispatcher.health.conditions(core.registry), view),
            }
        if view >= View.OPERATOR:
            info["incarnation"] = self._incarnation
        return info


def of_service(model: ServedModel, ready: bool, nodes: Iterable[Node]) -> dict[str, Any]:
    """Return the part that every client sees: what it may ask for, but not where or how it is served."""
    return {
        "served_model_name": model.name,
        "max_model_len": model.max_model_len,
        "ready": ready,
        "parameters": PARAMETERS,
        "internal_states": [_accept_lengths(node) for node in nodes if node.role == "decode"],
    }


def of_nodes(conditions: Sequence[Condition], view: View) -> dict[str, Any]:
    """Return `nodes` and `internal_states`, for View.CLUSTER and above."""
    return {
        "nodes": [_describe(each, view) for each in conditions if each.node.state != "standby"],
        "internal_states": [
            {
                "node": node.name,
                **_accept_lengths(node),
                "spec_accepted_at": node.counters.spec_accepted_at,
                "phase_seconds": node.counters.phase_seconds,
                "load": msgspec.to_builtins(node.load),
            }
            for node in (condition.node for condition in conditions)
            if node.role == "decode"
        ],
    }


def _accept_lengths(node: Node) -> dict[str, float]:
    """Return the tokens per step and request: in answers, and accepted by verification."""
    return {
        "avg_spec_accept_length": node.counters.avg_spec_accept_length,
        "avg_spec_verified_length": node.counters.avg_spec_verified_length,
    }


def _describe(condition: Condition, view: View) -> dict[str, Any]:
    node = condition.node
    register = node.register
    counters = msgspec.to_builtins(node.counters)
    del counters["ranks"]  # shown as `ranks` of the node
    process = {"incarnation": node.incarnation, "host": register.host, "pid": register.pid}
    return {
        "name": node.name,
        "role": node.role,
        "movable": node.movable,
        "state": node.state,
        **(process if view >= View.OPERATOR else {}),
        "config": register.effective_config,
        "tp_size": max(len(register.ranks), 1),
        "ranks": _ranks(node),
        "graphs": msgspec.to_builtins(register.graphs),
        "load": msgspec.to_builtins(node.load),
        "counters": counters,
        "assigned": len(node.rooms),
        "reachable": node.reachable,
        "weight": round(condition.weight, 3),
        "breaker": condition.breaker,
        "bad_peers": condition.bad_peers,
        "as_of": node.as_of,
    }


def _ranks(node: Node) -> list[dict[str, Any]]:
    """Return what each rank holds, and how far it is if there are several."""
    reports, totals = node.register.ranks, node.counters.ranks
    return [
        {
            **msgspec.to_builtins(report),
            **(msgspec.to_builtins(totals[rank]) if rank < len(totals) else {}),
        }
        for rank, report in enumerate(reports)
    ]
