"""Sends what the requests of one turn of the event loop have for nodes together, at the end of the turn.

A message that finds ZMQ's thread asleep has to wake it, which costs several times as much as the message itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from router.nodes.registry import Node

# From routing id and message to whether the node can be reached.
Send = Callable[[str, msgspec.Struct], bool]
Messages = list[tuple[str, Node, msgspec.Struct]]  # (routing id, node, message) in sending order
Unreached = asyncio.Future[Node | None]  # the first node to which sending failed


class Outbox:
    """Messages leave in the order in which they were put here."""

    def __init__(self, send: Send) -> None:
        """`send` takes (routing id, message) and returns False if the node cannot be reached."""
        self._send = send
        self._waiting: deque[tuple[Messages, Unreached | None]] = deque()

    def put(self, messages: Iterable[tuple[str, Node, msgspec.Struct]]) -> Unreached:
        """Send the messages up to the first that fails. If the result is cancelled before, none of them is sent."""
        unreached: Unreached = asyncio.get_running_loop().create_future()
        self._add(list(messages), unreached)
        return unreached

    def post(self, node: Node, message: msgspec.Struct) -> None:
        """Send one message; it does not matter whether the node can be reached."""
        self._add([(node.routing_id, node, message)], None)

    def _add(self, messages: Messages, unreached: Unreached | None) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append((messages, unreached))

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for messages, unreached in waiting:
            if unreached is not None and unreached.done():
                continue
            try:
                failed = next((node for peer, node, each in messages if not self._send(peer, each)), None)
            # One message that cannot be sent must not hold up those of other requests.
            except Exception as error:
                if unreached is None:
                    asyncio.get_running_loop().call_exception_handler(
                        {"message": "a message to a node could not be sent", "exception": error}
                    )
                else:
                    unreached.set_exception(error)
                continue
            if unreached is not None:
                unreached.set_result(failed)
