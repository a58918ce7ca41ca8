"""Names of nodes, and patterns like `decode-*`, by which nodes join under names that the cluster file does not list."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

OWN = "own"  # as the host in the address of a node: the address of its own host, which only the node knows
# Schemes of the control address if routers are found: by the addresses of a name, by the EndpointSlices of a Service.
DNS = "dns://"
SLICES = "endpointslices://"
FOUND = (DNS, SLICES)
ANY = "*"  # last character of a pattern, and nowhere else
NODE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")  # as long as a DNS label


def is_pattern(entry: str) -> bool:
    """Return whether a name in a cluster file is a pattern."""
    return entry.endswith(ANY)


def matches(pattern: str, name: str) -> bool:
    """Return whether a node may have `name` by `pattern`. The pattern itself is not a name."""
    start = pattern.removesuffix(ANY)
    return name.startswith(start) and name != start and NODE_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class NodeNames:
    """The names and patterns of a cluster file. A listed name belongs to its own entry, whatever patterns match it."""

    listed: frozenset[str]
    patterns: tuple[str, ...]  # no name matches two of them; the configuration is checked for that

    @classmethod
    def of(cls, entries: Iterable[str]) -> NodeNames:
        """Take the names of all entries, patterns included."""
        entries = list(entries)
        return cls(
            frozenset(entry for entry in entries if not is_pattern(entry)),
            tuple(entry for entry in entries if is_pattern(entry)),
        )

    def entry(self, name: str) -> str | None:
        """Return the entry to which a node's name belongs: the name itself or a pattern; None if no entry fits."""
        if name in self.listed:
            return name
        return next((pattern for pattern in self.patterns if matches(pattern, name)), None)

    def key_of(self, name: str) -> str:
        """Return the name of the key that proves `name`: its own, or the pattern, whose key several processes share."""
        return self.entry(name) or name

    def shares_key(self, name: str) -> bool:
        """Return whether other processes may have the key of `name`, which is a process's name or a pattern."""
        return is_pattern(self.key_of(name))


NO_NAMES = NodeNames.of(())


def overlap(one: str, other: str) -> bool:
    """Return whether some name matches both patterns."""
    a, b = one.removesuffix(ANY), other.removesuffix(ANY)
    return a.startswith(b) or b.startswith(a)
