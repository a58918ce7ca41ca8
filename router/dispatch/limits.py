"""The limits for dispatching requests that the cluster file sets."""

from __future__ import annotations

from dataclasses import dataclass

# The refusal of a request at its deadline.
TOO_LONG = "the request took longer than router.request_timeout allows; ask for fewer tokens"


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Limits from the sections `router` and `decode` of the config, which has their defaults."""

    max_attempts: int
    max_requests: int
    request_timeout: float
    placement_wait: float
    retry_ratio: float
    queue_wait: float
    max_crashes: int
    reserved_tokens: int  # answer tokens that a decode node reserves for a request
    first_token_hold: float  # seconds for which the first token of a stream is kept back at most
    requests_per_node: int  # requests that a decode node may have in its batch or in transfer
