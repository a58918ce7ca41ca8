"""Orders of operators that nodes answer: profiles and changes of roles."""

from __future__ import annotations

from dataclasses import dataclass

from common.messages.router_inbox import ChangeAnswered, ProfileEnded
from router.nodes.profiles import NodeProfiles
from router.nodes.registry import Node
from router.nodes.role_changes import RoleChanges


@dataclass(frozen=True, slots=True)
class OperatorOrders:
    """Passes answers of nodes to the operators who wait for them."""

    profiles: NodeProfiles
    roles: RoleChanges

    def answered(self, incarnation: str, answer: ProfileEnded | ChangeAnswered) -> None:
        """Take an answer of a node."""
        if isinstance(answer, ProfileEnded):
            self.profiles.ended(incarnation, answer)
        else:
            self.roles.answered(incarnation, answer)

    def lost(self, node: Node) -> None:
        """Note that a node is lost, which then answers nothing. Changes of roles follow the registry."""
        self.profiles.lost(node)
