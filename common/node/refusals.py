"""Decides when a node ends because routers refuse it.

A router that refuses a node may be the exception: during a rolling upgrade it has another protocol version or another
cluster file. Requests of routers that serve the node must not end because of that, and the node asks the refusing one
again.
"""

from __future__ import annotations

from collections.abc import Collection

from common.node.to_router import ToRouter

ANSWER_SECONDS = 10.0  # seconds that a refused node waits for the answers of other routers


class Refusals:
    """The routers that have refused this node since a router served it."""

    def __init__(self) -> None:
        self._refused: set[ToRouter] = set()
        self._since = 0.0

    def final(self, router: ToRouter, serving: Collection[ToRouter], routers: int, now: float) -> bool:
        """Note a refusal; return whether the node must end.

        It must if a router that served it refuses it, if all routers do, or if no other one has answered for a while.

        Args:
            serving: the routers that have registered this node.
            routers: number of all routers.
            now: monotonic seconds.
        """
        if serving:
            self._refused.clear()
            return router in serving
        if not self._refused:
            self._since = now
        self._refused.add(router)
        return len(self._refused) >= routers or now - self._since > ANSWER_SECONDS
