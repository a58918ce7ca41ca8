"""Orders waiting requests on both roles: the shortest is next, and waiting makes a request count as shorter."""

from __future__ import annotations

AGEING_SECONDS = 10.0  # wait after which a request counts half its length


def aged(tokens: int, waited: float) -> float:
    """Return the cost of serving `tokens` next for a request that has waited `waited` seconds; the lowest is next.

    A request that has waited AGEING_SECONDS counts half its length, one that has waited three times as long a
    quarter. So waiting times are in proportion to length, whatever the speed of the node, and no request waits for
    ever: the cost of a long one falls below that of every new one.
    """
    return tokens / (AGEING_SECONDS + waited)


PROMOTION_SECONDS = 10.0  # wait after which a request counts as one priority more urgent


def promoted(priority: int, waited: float, most_urgent: int) -> int:
    """Return the priority that a request counts with after it has waited; the lowest is next.

    `most_urgent`: the lowest priority of all requests that wait. A request that has waited long enough reaches it, so
    that no request waits for ever, and then competes by its cost (see `aged`).
    """
    return max(priority - int(waited / PROMOTION_SECONDS), most_urgent)
