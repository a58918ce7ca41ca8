"""The parts of a router in groups, built by build.py and by tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import zmq

from common.ipc import LinkSecurity
from common.messages.identity import Role
from common.observability.event_log import EventLog
from common.observability.logs import Log
from router.dispatch.limits import DispatchLimits
from router.images.loader import ImageLoader
from router.nodes.placement import PlacementPolicy
from router.nodes.placement_rules import PlacementRules
from router.nodes.registration import RegistrationRules
from router.process.spawner import Spawner
from router.text.pool import TextPool
from router.text.service import TextService
from router.tokens.tokenizer import Tokenizer
from router.tracing.traces import Traces


@dataclass(frozen=True, slots=True)
class ControlLink:
    """The control socket, and the name under which this router speaks on it."""

    context: zmq.Context[zmq.Socket[bytes]]
    address: str
    incarnation: str
    security: LinkSecurity
    queued_bytes: int  # that may be queued for one node


@dataclass(frozen=True, slots=True)
class NodeRules:
    """The router's expectations of its nodes. Durations are in seconds.

    Attributes:
        fingerprint: identifies the model that every node has to serve.
        configured: names and patterns of the nodes that the router waits for while they are absent.
        node_timeout: after which a silent node is lost.
        loop_timeout: after which a node whose main loop hangs is lost.
        return_window: for which an absent node is expected back.
        slow_start: in which a node that has joined takes its full share of requests.
    """

    registration: RegistrationRules
    fingerprint: str
    configured: Mapping[Role, Sequence[str]]
    node_timeout: float
    loop_timeout: float
    return_window: float
    slow_start: float


@dataclass(frozen=True, slots=True)
class Dispatching:
    """The rules by which requests are placed on nodes, and their number."""

    policies: dict[Role, PlacementPolicy]
    limits: DispatchLimits
    drain_timeout: float  # seconds that requests in flight get when the router ends
    rng: Random  # draws samples of many nodes
    placement: PlacementRules


@dataclass(frozen=True, slots=True)
class Observation:
    """The log and the events of the router, its facts for operators, and the clock by which it judges nodes."""

    log: Log
    model: str  # name of the model in metrics
    events: EventLog
    config: Mapping[str, Any]  # the configuration, as /server_info shows it
    max_model_len: int  # bounds of histograms of tokens go up to it
    traces: Traces
    # The directory of profiles of this process; raises ConfigError.
    profiles: Callable[[], Path]
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class ApiParts:
    """The parts with which the handlers of the HTTP API read requests, and their limits."""

    tokenizer: Tokenizer
    tokenizer_info: bytes  # the answer of /tokenizer_info
    texts: TextService
    images: ImageLoader
    max_requests: int  # prompts in flight, of all clients


@dataclass(frozen=True, slots=True)
class ChildProcesses:
    """The child processes that handle texts and images."""

    spawner: Spawner
    texts: TextPool
    images: ImageLoader

    async def start(self) -> None:
        """Start the text workers. Raises ModelError."""
        try:
            await self.texts.start()
        except BaseException:
            await self.spawner.close()
            raise

    async def close(self) -> None:
        await self.images.close()
        await self.texts.close()
        await self.spawner.close()
