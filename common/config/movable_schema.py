"""The section of a cluster file that names the movable nodes, which can change their role."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from common.config.section import Fraction, NodeName, Positive, Section


class MovableNodeEntry(Section, frozen=True, kw_only=True):
    """One movable node, whose name is listed in prefill.nodes and decode.nodes, too."""

    name: NodeName
    role: Literal["prefill", "decode"] = "decode"  # that it starts with


class MovableSection(Section, frozen=True, kw_only=True):
    """The nodes that can change their role, and how they divide their device: each has a pool for either role."""

    nodes: Annotated[tuple[MovableNodeEntry, ...], Meta(max_length=256)] = ()
    # Pools of each movable node; auto: pool_tokens of prefill or decode, if that is a number. Otherwise on a CPU as
    # there, and on a GPU what these shares leave; the weights count as a part of the first one.
    prefill_pool_tokens: Positive | Literal["auto"] = "auto"
    decode_pool_tokens: Positive | Literal["auto"] = "auto"
    prefill_memory_fraction: Fraction = 0.45
    decode_memory_fraction: Fraction = 0.45

    def role_of(self, name: str) -> Literal["prefill", "decode"] | None:
        """Return the role that a movable node starts with; None for other nodes."""
        return next((node.role for node in self.nodes if node.name == name), None)

    def tokens_of(self, role: str) -> int | Literal["auto"]:
        """Return the configured size of the pool for one role."""
        return self.prefill_pool_tokens if role == "prefill" else self.decode_pool_tokens

    def fraction_of(self, role: str) -> float:
        """Return the share of its GPU that the half for one role takes, if the size of its pool is not given."""
        return self.prefill_memory_fraction if role == "prefill" else self.decode_memory_fraction
