"""The place of a request in a distributed trace, by W3C's header traceparent."""

from __future__ import annotations

import re
import secrets

import msgspec

TRACEPARENT = "traceparent"
# version, trace id, parent's span id, flags; later versions may append fields
_HEADER = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_SAMPLED = 1


class TraceContext(msgspec.Struct, frozen=True):
    """One request of a trace. Its span is the parent of the spans of its parts."""

    trace_id: int  # 128 bits
    span_id: int  # 64 bits, the request's own
    parent_id: int | None  # the caller's span; None: the trace begins here
    sampled: bool = True

    @classmethod
    def begin(cls, header: str) -> TraceContext:
        """Continue the trace that a client's header names, or begin one if it names none."""
        found = _HEADER.fullmatch(header.strip()[:256])
        if found is None:
            return cls(new_id(128), new_id(64), None)
        trace, parent, flags = (int(part, 16) for part in found.groups())
        return cls(trace, new_id(64), parent, bool(flags & _SAMPLED))

    def sibling(self) -> TraceContext:
        """Return the context of another request with the same parent."""
        return TraceContext(self.trace_id, new_id(64), self.parent_id, self.sampled)

    @property
    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def new_id(bits: int) -> int:
    """Return a random id, which is never 0."""
    return secrets.randbits(bits) or 1
