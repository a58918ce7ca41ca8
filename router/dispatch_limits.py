"""What the cluster file says about how requests are dispatched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Limits from the router section of the config."""

    max_attempts: int
    max_requests: int
    request_timeout: float
    placement_wait: float
    retry_ratio: float = 0.2
    queue_wait: float = 30.0
    max_crashes: int = 2
    reserved_tokens: int = 256  # that a decode node reserves for the answer of a request
    requests_per_node: int = 1 << 20  # that a decode node may have in its batch or in transfer
