"""One request while the dispatcher works on it, across its attempts."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.generation import GenerationRequest
from router.timeline import Timeline


@dataclass(slots=True, eq=False)
class InFlight:
    """What the attempts of a request share."""

    request: GenerationRequest
    timeline: Timeline
    deadline: float  # of the event loop's clock
    said: list[int] = field(default_factory=list)  # tokens that went to the client
    avoid: set[str] = field(default_factory=set)  # incarnations that are to blame for failed attempts
    attempts: int = 0
    suspect: bytes = b""  # fingerprint, once it was on a node that crashed

    @property
    def tokens(self) -> list[int]:
        """What is prefilled: the prompt and what was said."""
        return [*self.request.token_ids, *self.said]
