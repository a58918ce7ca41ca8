"""Quotas of API keys: requests and tokens per minute, and prompts in flight, over all router processes of a host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from common.api_key import ApiKey
from common.errors import RateLimited
from router.auth.ledger import KeyLedger, Ledger, Levels, NoLedger, Use

CONCURRENCY_RETRY = 1.0  # seconds of Retry-After: when another request of the key ends is unknown


class Bucket:
    """A token bucket that holds one minute's allowance and refills continuously. Its level may become negative."""

    __slots__ = ("_level", "_seen", "per_minute")

    def __init__(self, per_minute: int, now: float, level: float | None = None) -> None:
        """`level`: what is left at the time `now`; by default all."""
        self.per_minute = per_minute
        self._level = float(per_minute) if level is None else level
        self._seen = now

    def level(self, now: float) -> float:
        filled = self._level + (now - self._seen) * self.per_minute / 60
        self._level, self._seen = min(filled, float(self.per_minute)), now
        return self._level

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def seconds_until(self, level: float, now: float) -> float:
        return max(level - self.level(now), 0.0) * 60 / self.per_minute


class Answered(Protocol):
    """The tokens that a request has used so far."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...


class QuotaClaim:
    """The quota claim of one admitted HTTP request. `release` must be called exactly once."""

    __slots__ = ("_prompts", "_quota", "_usage")

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._prompts = 1
        self._usage: Answered | None = None

    def begin(self, prompts: int, usage: Answered) -> None:
        """Claim the prompts of the request, once its body is read. `usage` keeps counting until the request ends.

        Raises RateLimited if the key may not have that many prompts in flight.
        """
        self._quota.occupy(prompts - self._prompts)
        self._prompts = prompts
        self._usage = usage
        self._quota.spend(usage.prompt_tokens)

    def release(self) -> None:
        self._quota.leave(self._prompts)
        if self._usage is not None:
            self._quota.spend(self._usage.completion_tokens)


class NoLimits(QuotaClaim):
    """The claim of clients without limits: probes, operators, and everyone if the cluster has no keys."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def begin(self, prompts: int, usage: Answered) -> None:
        pass

    def release(self) -> None:
        pass


UNLIMITED = NoLimits()


class Quota:
    """The limits of one key and what is left of them. `clock` is monotonic."""

    def __init__(self, key: ApiKey, clock: Callable[[], float], ledger: KeyLedger) -> None:
        """`ledger`: what other router processes have used of the key."""
        self._clock = clock
        self._ledger = ledger
        self._running = 0  # at this process
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.configure(key)
        self._begin()

    def configure(self, key: ApiKey) -> None:
        """Apply the limits that the key file has now; a limit that did not change keeps its level."""
        self._id, self._concurrency = key.id, key.concurrency
        self._requests = self._bucket(self._requests, key.requests_per_minute)
        self._tokens = self._bucket(self._tokens, key.tokens_per_minute)

    @property
    def running(self) -> int:
        """Prompts in flight."""
        return self._running

    def admit(self) -> QuotaClaim:
        """Count one request. Raises RateLimited; a refused request is not counted."""
        now = self._clock()
        self._follow(now)
        self._check(self._requests, "requests_per_minute", now)
        self._check(self._tokens, "tokens_per_minute", now)
        self._check_running(1)
        if self._requests is not None:
            self._requests.take(1, now)
        self._running += 1
        self._note(Use(requests=1, running=1), now)
        return QuotaClaim(self)

    def occupy(self, prompts: int) -> None:
        """Count further prompts in flight. Raises RateLimited if there are any that the key may not have."""
        if prompts > 0:
            self._check_running(prompts)
        self._running += prompts
        self._note(Use(running=prompts), self._clock())

    def leave(self, prompts: int) -> None:
        self._running -= prompts
        self._note(Use(running=-prompts), self._clock())

    def spend(self, tokens: int) -> None:
        """Subtract used tokens. If the level becomes negative, the next request waits until it is refilled."""
        now = self._clock()
        if self._tokens is not None:
            self._tokens.take(tokens, now)
        self._note(Use(tokens=tokens), now)

    def headers(self) -> dict[str, str]:
        """Return the rate limit headers under OpenAI's names."""
        now, found = self._clock(), dict[str, str]()
        self._follow(now)
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(max(math.floor(bucket.level(now)), 0))
                found[f"x-ratelimit-reset-{name}"] = duration(bucket.seconds_until(bucket.per_minute, now))
        return found

    def _begin(self) -> None:
        """Begin with what the other processes have left of limits that they serve already.

        A process that has not used the key for a while does not know what others have used since, so the least counts.
        """
        now = self._clock()
        known = [each for each in self._ledger.left() if each.at <= now]
        for bucket, levels in (
            (self._requests, [(each.requests, each.at) for each in known]),
            (self._tokens, [(each.tokens, each.at) for each in known]),
        ):
            if bucket is not None and levels:
                least = min(Bucket(bucket.per_minute, at, level).level(now) for level, at in levels)
                bucket.take(bucket.level(now) - least, now)

    def _follow(self, now: float) -> None:
        """Subtract what other processes have used meanwhile."""
        requests, tokens = self._ledger.used()
        if requests and self._requests is not None:
            self._requests.take(requests, now)
        if tokens and self._tokens is not None:
            self._tokens.take(tokens, now)

    def _note(self, use: Use, now: float) -> None:
        """Let the other processes know."""
        self._follow(now)
        requests, tokens = (
            math.inf if each is None else each.level(now) for each in (self._requests, self._tokens)
        )
        self._ledger.add(use, Levels(requests, tokens, now))

    def _check_running(self, prompts: int) -> None:
        if self._concurrency is None:
            return
        running = self._running + self._ledger.running()
        if running + prompts > self._concurrency:
            raise RateLimited(
                f"API key {self._id} may have {self._concurrency} prompts in flight (concurrency) and has "
                f"{running}; wait for one to end",
                retry_after=CONCURRENCY_RETRY,
            )

    def _check(self, bucket: Bucket | None, limit: str, now: float) -> None:
        wait = bucket.seconds_until(1, now) if bucket is not None else 0
        if bucket is not None and wait > 0:
            raise RateLimited(
                f"API key {self._id} has used its {limit}, {bucket.per_minute}; try again in {duration(wait)}",
                retry_after=wait,
            )

    def _bucket(self, old: Bucket | None, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        if old is not None and old.per_minute == per_minute:
            return old
        return Bucket(per_minute, self._clock())


class Quotas:
    """The quota of each key, by key id."""

    def __init__(self, clock: Callable[[], float], ledger: Ledger | None = None) -> None:
        """`ledger`: shared with other router processes; None: there are none."""
        self._clock = clock
        self._ledger = ledger or NoLedger()
        self._of: dict[str, Quota] = {}

    def __len__(self) -> int:
        return len(self._of)

    def of(self, key: ApiKey) -> Quota:
        quota = self._of.get(key.id)
        if quota is None:
            quota = self._of[key.id] = Quota(key, self._clock, self._ledger.key(key.id))
        return quota

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Follow a reload of the key file: drop removed keys and keep what the others have used."""
        known = {key.id: key for key in keys}
        self._ledger.retain(known)
        self._of = {id_: quota for id_, quota in self._of.items() if id_ in known}
        for id_, quota in self._of.items():
            quota.configure(known[id_])


def duration(seconds: float) -> str:
    """Format a duration as OpenAI does: 120ms, 2s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
