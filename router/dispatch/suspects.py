"""Finds the request that crashes nodes without refusing requests that merely shared a node with it.

The socket of a process closes when it crashes. Its requests are placed again, and this table remembers them:

- First crash: every request on the node is suspected. All of them continue at once, wherever there is room.
- A crash under suspects: those with the most crashes are to blame. If there is only one, it is quarantined. If there
  are several, each gets one more crash, and from then on they run in isolation (`needs_isolation`): one at a time, or
  in a few groups if they are many (`isolation.py`), which a further crash divides again.
- A crash under a quarantined request that was running there before its quarantine makes no other request a suspect.
- A request that gets past the position at which its node crashed, or ends, is cleared.

So one request that always crashes a node at the same position costs two crashes if it is the only suspect, and three if
up to eight requests always accompany it: together, together, isolated. Eight times as many requests cost one more
crash, and so does each further such request. Only the death of a process counts: a node that returns under the same
incarnation has only lost its connection, and its suspicions are withdrawn. Silence, hangs, drains and goodbyes never
count.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from common.messages.identity import Role
from router.dispatch.generation import GenerationRequest

CLEARED_BY = 8  # tokens past the crash; the last tokens before it may not have arrived here
MAX_SUSPECTS = 8192
MAX_QUARANTINED = 1024
RECENT_CRASHES = 64
HASHED = 2048  # tokens at each end of a prompt


def fingerprint(request: GenerationRequest) -> bytes:
    """Identify what a request computes in less than 0.1 ms: long prompts are hashed by both ends and their length.

    The seed is left out: the router draws a new one when a client sends the request again.
    """
    tokens = request.token_ids
    ends = tokens if len(tokens) <= 2 * HASHED else [len(tokens), *tokens[:HASHED], *tokens[-HASHED:]]
    digest = hashlib.blake2b(array("q", ends).tobytes(), digest_size=16)
    digest.update(msgspec.msgpack.encode(msgspec.structs.replace(request.sampling, seed=0)))
    for image in request.images:
        digest.update(image.span.digest)
    return digest.digest()


@dataclass(slots=True)
class Suspicion:
    """Crashes of one role at about one position of a request."""

    role: Role
    crashes: int
    position: int  # tokens emitted when its node last crashed
    since: float


@dataclass(slots=True)
class _Crash:
    before: dict[bytes, Suspicion | None]  # the previous suspicions of the requests on board
    quarantined: bytes | None


class Suspects:
    """The table of suspects. It is bounded, and every entry expires."""

    def __init__(self, expiry: float, clock: Callable[[], float], max_crashes: int) -> None:
        """Create an empty table.

        `expiry`: seconds after which a suspicion or a quarantine ends. A request that is the only one to blame is
        quarantined after `max_crashes`; 0 means never.
        """
        self._expiry = expiry
        self._max_crashes = max_crashes
        self._clock = clock
        self._suspects: OrderedDict[bytes, Suspicion] = OrderedDict()
        self._quarantine: OrderedDict[bytes, float] = OrderedDict()  # fingerprint -> when it was quarantined
        self._crashes: OrderedDict[str, _Crash] = OrderedDict()  # incarnation -> its crash

    def __len__(self) -> int:
        return len(self._suspects)

    @property
    def empty(self) -> bool:
        """True if no request is suspected or quarantined, so that fingerprints need not be computed."""
        return not self._suspects and not self._quarantine

    @property
    def quarantined(self) -> int:
        return len(self._quarantine)

    def is_quarantined(self, key: bytes) -> bool:
        since = self._quarantine.get(key)
        if since is not None and self._clock() - since >= self._expiry:
            del self._quarantine[key]
            return False
        return since is not None

    def is_suspect(self, key: bytes) -> bool:
        return self._get(key) is not None

    def needs_isolation(self, key: bytes) -> bool:
        """Return whether the request must not run together with other suspects."""
        return self._max_crashes > 0 and self.crashes(key) >= 2

    def crashes(self, key: bytes) -> int:
        """Return the number of crashes of which the request is suspected."""
        suspicion = self._get(key)
        return suspicion.crashes if suspicion is not None else 0

    def crashed(self, incarnation: str, role: Role, aboard: Mapping[bytes, int]) -> bytes | None:
        """Note a crash under `aboard` (fingerprint -> emitted tokens). Return the request to quarantine, if any."""
        copy = next((key for key in aboard if self.is_quarantined(key)), None)
        # It was running here when it was quarantined: no other request is suspected.
        if copy is not None:
            self._quarantine[copy] = self._clock()
            self._quarantine.move_to_end(copy)
            return copy
        known = {key: self._get(key) for key in aboard}
        counts = {key: each.crashes if each and each.role == role else 0 for key, each in known.items()}
        most = max(counts.values(), default=0)
        blamed = [key for key, crashes in counts.items() if crashes == most]
        for key in blamed:
            self._suspects[key] = Suspicion(role, most + 1, aboard[key], self._clock())
            self._suspects.move_to_end(key)
        enough = 0 < self._max_crashes <= most + 1
        convicted = blamed[0] if most and enough and len(blamed) == 1 else None
        if convicted is not None:
            del self._suspects[convicted]
            self._quarantine[convicted] = self._clock()
        self._crashes[incarnation] = _Crash({key: known[key] for key in blamed}, convicted)
        _trim(self._suspects, MAX_SUSPECTS)
        _trim(self._quarantine, MAX_QUARANTINED)
        _trim(self._crashes, RECENT_CRASHES)
        return convicted

    def returned(self, incarnation: str) -> None:
        """Withdraw the suspicions of a crash: the process lives."""
        crash = self._crashes.pop(incarnation, None)
        if crash is None:
            return
        if crash.quarantined is not None:
            self._quarantine.pop(crash.quarantined, None)
        for key, before in crash.before.items():
            if before is None:
                self._suspects.pop(key, None)
            elif key in self._suspects or key == crash.quarantined:
                self._suspects[key] = before

    def presumed_crashed(self) -> list[str]:
        """Return the incarnations that crashed recently."""
        return list(self._crashes)

    def progressed(self, key: bytes, emitted: int) -> None:
        """Clear the request if it has emitted enough tokens past its crash."""
        suspicion = self._suspects.get(key)
        if suspicion is not None and emitted >= suspicion.position + CLEARED_BY:
            del self._suspects[key]

    def prefilled(self, key: bytes) -> None:
        """Clear a request suspected on a prefill node once its pages are handed over."""
        suspicion = self._suspects.get(key)
        if suspicion is not None and suspicion.role == "prefill":
            del self._suspects[key]

    def completed(self, key: bytes) -> None:
        self._suspects.pop(key, None)

    def _get(self, key: bytes) -> Suspicion | None:
        suspicion = self._suspects.get(key)
        if suspicion is not None and self._clock() - suspicion.since >= self._expiry:
            del self._suspects[key]
            return None
        return suspicion


def _trim(
    table: OrderedDict[bytes, Suspicion] | OrderedDict[bytes, float] | OrderedDict[str, _Crash], most: int
) -> None:
    """Drop the oldest entries."""
    while len(table) > most:
        table.popitem(last=False)
