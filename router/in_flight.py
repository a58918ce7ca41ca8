"""One request while the dispatcher works on it, over all its attempts."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.generation import GenerationRequest
from router.timeline import Timeline


@dataclass(slots=True, eq=False)
class InFlight:
    """State shared by the attempts of a request."""

    request: GenerationRequest
    timeline: Timeline
    deadline: float  # on the event loop's clock
    said: list[int] = field(default_factory=list)  # tokens that were sent to the client
    avoid: set[str] = field(default_factory=set)  # incarnations to blame for failed attempts
    attempts: int = 0
    suspect: bytes = b""  # fingerprint of the request, once a node crashed while it ran there
    shared_trial: bool = False  # the latest attempt ran in isolation together with other suspects

    @property
    def tokens(self) -> list[int]:
        """The tokens to prefill: the prompt and the answer so far."""
        return [*self.request.token_ids, *self.said]
