"""Says which role a node has: always its own, or that of one of the two halves of a movable node.

A movable node is two nodes in one process, one for each role, each with its own links, queues and pool. The half whose
role the node does not have is in standby: it stays registered, and takes no requests.

With `router.local_prefill` the half for prompts also takes some in standby, only for the half for decoding and in short
forwards.

up ──ChangeRole──> draining ──no requests left──> standby, while the other half becomes up
 └───────<──── out of time ──────┘
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.messages.identity import NodeState, Role
from common.messages.node_inbox import ChangeRole


class CurrentRole(Protocol):
    """The role of a node, or of one half of a movable node, at present."""

    def takes(self, peer: str) -> bool:
        """Return whether it takes a request that it shares with the node `peer` (an incarnation) of the other role."""
        ...

    def change(self, order: ChangeRole, now: float) -> str:
        """Begin to change the node's role. Return "", or the sentence that says why it does not."""
        ...

    def state(self, requests: int, now: float) -> NodeState:
        """Return the state of a node that has this many requests; called once per turn of its main loop."""
        ...

    def max_forward_tokens(self) -> int | None:
        """Return the most tokens of one forward of prompts; None: as many as the node's limits say."""
        ...


class FixedRole:
    """The role of a node that has one for good."""

    def takes(self, peer: str) -> bool:
        return True

    def change(self, order: ChangeRole, now: float) -> str:
        return "it is not movable"

    def state(self, requests: int, now: float) -> NodeState:
        return "up"

    def max_forward_tokens(self) -> int | None:
        return None


FIXED_ROLE = FixedRole()


@dataclass(frozen=True, slots=True)
class _Change:
    order: ChangeRole
    began: float  # monotonic seconds

    @property
    def deadline(self) -> float:
        return self.began + self.order.seconds


class RoleSwitch:
    """The role of a movable node. The main loops of both halves use it, each in its own thread."""

    def __init__(
        self, role: Role, settling: float, changed: Callable[[Role], None], local_tokens: int = 0
    ) -> None:
        """
        Args:
            role: the first one.
            settling: seconds for which a half drains at least, so that all routers hear that it drains and send nothing
                more. It takes what they have sent before.
            changed: called with each new role.
            local_tokens: the most tokens of a forward for the node's own half for decoding while that one serves.
        """
        self.local_tokens = local_tokens
        # Incarnation of the half for decoding, if the other half computes prompts for it; "": it does not.
        self.local_peer = ""
        self._lock = threading.Lock()
        self._role = role
        self._settling = settling
        self._changed = changed
        self._change: _Change | None = None

    @property
    def role(self) -> Role:
        return self._role

    def half(self, role: Role) -> HalfRole:
        """Return the current role of the half for `role`."""
        return HalfRole(self, role)

    def change(self, order: ChangeRole, now: float) -> str:
        """Begin a change; no-op if the node has that role. Return why it does not begin: another one is under way."""
        with self._lock:
            change = self._change
            if change is not None:
                return (
                    f"it is changing its role from {self._role} to {change.order.role}, for which "
                    f"{change.order.router} asked {now - change.began:.1f} s ago"
                )
            if order.role != self._role:
                self._change = _Change(order, now)
            return ""

    def state(self, half: Role, requests: int, now: float) -> NodeState:
        """Return the state of one half, and complete its change once it has no requests."""
        with self._lock:
            change = self._change
            if half != self._role:
                return "standby"
            if change is None:
                return "up"
            if requests and now >= change.deadline:
                self._change = None
                return "up"
            if requests or now < change.began + self._settling:
                return "draining"
            self._role, self._change = change.order.role, None
        self._changed(change.order.role)
        return "standby"


@dataclass(frozen=True, slots=True)
class HalfRole:
    """The role of one half of a movable node."""

    switch: RoleSwitch
    role: Role

    def takes(self, peer: str) -> bool:
        return self.switch.role == self.role or (self.role == "prefill" and peer == self.switch.local_peer)

    def change(self, order: ChangeRole, now: float) -> str:
        return self.switch.change(order, now)

    def state(self, requests: int, now: float) -> NodeState:
        return self.switch.state(self.role, requests, now)

    def max_forward_tokens(self) -> int | None:
        return None if self.switch.role == self.role else self.switch.local_tokens
