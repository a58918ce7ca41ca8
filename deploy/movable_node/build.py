"""Composition root of a movable node: builds the halves for both roles over the same weights."""

from __future__ import annotations

import sys
from dataclasses import replace

from common.config import Resolved
from common.errors import ConfigError
from common.messages.identity import Role
from common.node.late_compilations import report_late_compilations
from common.node.role_switch import RoleSwitch
from common.node.serving_model import ServingModel
from common.node.shared_device import SharedDevice
from common.node.shared_parts import SharedParts
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from decode_node import build as decode
from deploy.movable_node.halves import Halves
from prefill_node import build as prefill

SETTLING_HEARTBEATS = 2  # for which a half drains at least, so that the routers have heard of it
# Seconds for which one thread may keep the interpreter lock while another one waits. The default, ten times as long,
# would be most of a decode step.
LOCK_SECONDS = 0.0005


def build(resolved: Resolved, name: str, reporter: StartupReporter, log: Log) -> Halves:
    """Load the models once, allocate a KV pool for either role, capture the graphs of both, and bind all sockets.

    Raises ConfigError or ModelError with the remedy.
    """
    cluster = resolved.cluster
    role = cluster.movable.role_of(name)
    if role is None:
        known = ", ".join(node.name for node in cluster.movable.nodes) or "none"
        raise ConfigError("movable.nodes", f"no movable node is called {name!r}; the file has: {known}")
    sys.setswitchinterval(LOCK_SECONDS)

    def changed(to: Role) -> None:
        log.info("role changed", role=to)

    settling = SETTLING_HEARTBEATS * cluster.health.heartbeat_interval
    local_tokens = cluster.router.local_prefill
    switch = RoleSwitch(role, settling, changed, local_tokens)
    device, models = SharedDevice(), list[ServingModel]()
    # The half for prompts loads the weights: it runs the vision part, too.
    parts = SharedParts(switch.half("prefill"), device, loaded=models.append)
    prompts = prefill.build(resolved, name, reporter, log, parts)
    try:
        parts = replace(parts, role=switch.half("decode"), model=models[0])
        tokens = decode.build(resolved, name, reporter, log, parts)
    except BaseException:
        prompts.close()
        raise

    if local_tokens:
        switch.local_peer = tokens.node.life.incarnation

    announces = {"prefill": prompts.node.announce, "decode": tokens.node.announce}

    def begins(role: Role) -> None:
        device.use_from_here(announces[role])

    report_late_compilations(log, device.announce)  # either half has set this for itself
    return Halves(prompts, tokens, models[0].placement.device, log, begins)
