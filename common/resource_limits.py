"""Resource limits of a process that works on untrusted input."""

from __future__ import annotations

import resource


def lower_limit(kind: int, most: int) -> None:
    """Limit a resource of this process to `most`, or to the hard limit that is already in force if that is less."""
    _, hard = resource.getrlimit(kind)
    value = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (value, value))
