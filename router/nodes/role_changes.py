"""Lets a movable node change its role, one node at a time: it drains, and the router waits until it serves again."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import msgspec

from common.errors import Conflict, NoAnswer, NodeLost
from common.messages.identity import Role
from common.messages.node_inbox import ChangeRole
from common.messages.router_inbox import ChangeAnswered
from common.observability.logs import Log
from router.nodes.outbox import Send
from router.nodes.registry import Node, NodeRegistry

LOOK_SECONDS = 0.05  # interval at which the states of both halves are read
# For the answer of a node, after the work that its main loop has announced. A broken link is dialled again within 4 s.
ANSWER_SECONDS = 10.0
GRACE_SECONDS = 3.0  # after the node's own deadline: its last heartbeat may be late


class RoleChanged(msgspec.Struct, frozen=True):
    """The outcome of a change."""

    name: str
    role: Role
    previous: Role
    drained: int  # requests that the node had when it was asked, and has finished since


class RoleChanges:
    """Changes roles by message, and follows the change in heartbeats."""

    def __init__(self, registry: NodeRegistry, send: Send, clock: Callable[[], float], log: Log) -> None:
        self._registry = registry
        self._send = send
        self._clock = clock
        self._log = log
        self._asked = ""  # name of the node that this process has asked and waits for
        self._order = ("", "")  # incarnation that has been asked, and the name of the order
        self._answer: ChangeAnswered | None = None

    async def change(self, name: str, role: Role, seconds: float, router: str) -> RoleChanged:
        """Return once the node serves in `role`. Its present requests have `seconds` to end.

        `router`: name of this process, which the node tells the others that ask it meanwhile.

        Raises:
            UnknownNode: no such node is registered.
            Conflict: it cannot change its role now; the text says why.
            NoAnswer: it did not answer, or still had requests when the time was over, and keeps its role.
            NodeLost: it was lost meanwhile.
        """
        serving, other = self._halves(name)
        if serving.role == role and serving.state != "draining":
            return RoleChanged(name, role, role, 0)
        self._check(serving)
        drained = len(serving.rooms) + serving.others.requests
        order = ChangeRole(order=secrets.token_hex(8), router=router, role=role, seconds=seconds)
        self._asked, self._order, self._answer = name, (serving.incarnation, order.order), None
        try:
            if not self._send(serving.routing_id, order):
                raise NodeLost(f"{name} cannot be reached")
            await self._begin(serving, other)
            await self._follow(serving, other, seconds)
        finally:
            self._asked, self._order = "", ("", "")
        self._log.info("role changed", peer=name, role=role, requests=drained)
        return RoleChanged(name, role, serving.role, drained)

    def answered(self, incarnation: str, answer: ChangeAnswered) -> None:
        """Take the answer of a node. What nobody waits for any longer is dropped."""
        if (incarnation, answer.order) == self._order:
            self._answer = answer

    def _halves(self, name: str) -> tuple[Node, Node]:
        """Return the half of a movable node that serves, and the other one."""
        halves = self._registry.named(name)
        if not halves[0].movable:
            raise Conflict(
                f"{name} is a {halves[0].role} node for good: only the nodes in movable.nodes of the cluster file can "
                "change their role"
            )
        serving = [node for node in halves if node.state != "standby"]
        standby = [node for node in halves if node.state == "standby"]
        if not (serving and standby):
            raise Conflict(f"{name} is starting or ending; try again later")
        return serving[0], standby[0]

    def _check(self, serving: Node) -> None:
        """Raise Conflict if a change cannot begin now."""
        draining = [node.name for node in self._registry if node.movable and node.state == "draining"]
        busy = self._asked or next(iter(draining), "")
        if busy:
            raise Conflict(
                f"{busy} is changing its role or ending; only one node changes its role at a time: try again later"
            )
        others = [node for node in self._registry.eligible() if node.role == serving.role]
        if not [node for node in others if node is not serving]:
            raise Conflict(
                f"{serving.name} is the only {serving.role} node that takes requests; start another one first"
            )

    async def _begin(self, serving: Node, other: Node) -> None:
        """Return once the node has answered that it changes its role."""
        asked = self._clock()
        while self._answer is None:
            await self._wait(serving, other)
            if self._clock() > asked + serving.announced + ANSWER_SECONDS:
                raise NoAnswer(
                    f"{serving.name} has not answered the order to change its role; it may still follow it"
                )
        if self._answer.refusal:
            raise Conflict(f"{serving.name} refuses: {self._answer.refusal}; try again later")

    async def _follow(self, serving: Node, other: Node, seconds: float) -> None:
        """Return once heartbeats of both halves say that the other one serves."""
        until = self._clock() + seconds + GRACE_SECONDS
        while (serving.state, other.state) != ("standby", "up"):
            await self._wait(serving, other)
            if self._clock() > until:
                raise NoAnswer(
                    f"{serving.name} still had requests after {seconds:g} s and goes on as a {serving.role} node; try "
                    "again later, or with a longer timeout"
                )

    async def _wait(self, serving: Node, other: Node) -> None:
        """Wait until it is time to look again. Raises NodeLost if a half was lost, as its process or link has ended."""
        await asyncio.sleep(LOOK_SECONDS)
        if serving.lost_by or other.lost_by:
            raise NodeLost(f"{serving.name} was lost while it changed its role")
