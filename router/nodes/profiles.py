"""Orders nodes to record profiles, and waits for their answers."""

from __future__ import annotations

import asyncio
import secrets

from common.errors import Conflict, NoAnswer, NodeLost, Unavailable
from common.messages.node_inbox import Profile
from common.messages.router_inbox import ProfileEnded
from router.nodes.outbox import Send
from router.nodes.registry import Node, NodeRegistry

WRITE_SECONDS = 60.0  # after a recording, for its file


class NodeProfiles:
    """Allows one open order per node. Meanwhile the node itself refuses the orders of other routers."""

    def __init__(self, registry: NodeRegistry, send: Send) -> None:
        self._registry = registry
        self._send = send
        # incarnation -> (order, its answer)
        self._open: dict[str, tuple[str, asyncio.Future[ProfileEnded]]] = {}

    async def record(self, name: str, seconds: float, steps: int) -> ProfileEnded:
        """Return the answer of the node.

        Raises UnknownNode, Conflict while another profile of it is recorded, Unavailable if it could not record one,
        NodeLost or NoAnswer.
        """
        # A movable node is recorded in the role that it has.
        node = min(self._registry.named(name), key=lambda each: each.state == "standby")
        if node.incarnation in self._open:
            raise Conflict(f"a profile of {name} is being recorded; try again when it has ended")
        order, ended = secrets.token_hex(8), asyncio.get_running_loop().create_future()
        self._open[node.incarnation] = (order, ended)
        try:
            if not self._send(node.routing_id, Profile(order=order, seconds=seconds, steps=steps)):
                raise Unavailable(f"{name} cannot be reached now; try again")
            async with asyncio.timeout(seconds + WRITE_SECONDS):
                answer: ProfileEnded = await ended
        except TimeoutError:
            raise NoAnswer(
                f"{name} did not answer {WRITE_SECONDS:g} s after the profile should end"
            ) from None
        finally:
            del self._open[node.incarnation]
        if answer.busy:
            raise Conflict(f"{name} is recording another profile; try again when it has ended")
        if answer.problem:
            raise Unavailable(f"{name}: {answer.problem}")
        return answer

    def ended(self, incarnation: str, answer: ProfileEnded) -> None:
        """Take the answer of a node. What nobody waits for any longer is dropped."""
        order, ended = self._open.get(incarnation, ("", None))
        if ended is not None and order == answer.order and not ended.done():
            ended.set_result(answer)

    def lost(self, node: Node) -> None:
        """Note that a node is lost, which then answers nothing."""
        _, ended = self._open.get(node.incarnation, ("", None))
        if ended is not None and not ended.done():
            ended.set_exception(NodeLost(f"{node.name} was lost while its profile was recorded"))
