"""Remembers which configured nodes are absent, so that a request waits for a role that is about to return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from common.messages.identity import Role
from common.node_names import NO_NAMES, NodeNames

MAX_AWAY = 256  # names by patterns that are remembered; beyond it those that left first are forgotten


class ReturnWatch:
    """Expects a node of the cluster file back for `window` seconds after it left, or after the router's start.

    Of the nodes that join by a pattern, it expects one from the start, and each one that has left.
    """

    def __init__(
        self, configured: Mapping[Role, Collection[str]], window: float, clock: Callable[[], float]
    ) -> None:
        self._configured = {role: NodeNames.of(names) for role, names in configured.items()}
        self._window = window
        self._clock = clock
        now = clock()
        self._away = {role: dict.fromkeys(names, now) for role, names in configured.items()}

    def arrived(self, role: Role, name: str) -> None:
        away = self._away.get(role, {})
        away.pop(name, None)
        away.pop(self._configured.get(role, NO_NAMES).key_of(name), None)

    def left(self, role: Role, name: str) -> None:
        if self.is_configured(role, name):
            now, away, listed = self._clock(), self._away[role], self._configured[role].listed
            # Names by a pattern may never come back, and there is no end to them.
            for old in [each for each, since in away.items() if now - since > self._window]:
                if old not in listed:
                    del away[old]
            away.pop(name, None)
            away[name] = now
            if len(away) > len(self._configured[role].listed) + MAX_AWAY:
                # The order is that in which they left.
                del away[next(each for each in away if each not in listed)]

    def is_configured(self, role: Role, name: str) -> bool:
        return self._configured.get(role, NO_NAMES).entry(name) is not None

    def remaining(self, role: Role) -> float:
        """Return the seconds for which a node of `role` is still expected; 0 if none is."""
        latest = max(self._away.get(role, {}).values(), default=None)
        return 0.0 if latest is None else max(latest + self._window - self._clock(), 0.0)

    def expected(self, role: Role) -> list[str]:
        """Return the names of the nodes that are expected back, sorted."""
        oldest = self._clock() - self._window
        return sorted(name for name, since in self._away.get(role, {}).items() if since > oldest)
