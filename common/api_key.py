"""An API key as the cluster knows it: everything but the key itself."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.messages.generation import Priority

Scope = Literal["inference", "admin"]
KeyId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
MAX_WEIGHT = 1000
PerMinute = Annotated[int, Meta(ge=1, le=10**12)]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file that security.api_keys names."""

    id: KeyId  # appears in logs, timelines and metrics
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]  # hash of the key
    scopes: tuple[Scope, ...] = ("inference",)
    expires: Annotated[datetime, Meta(tz=True)] | None = None  # after this time the key is unknown
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None  # prompt and answer tokens
    concurrency: Annotated[int, Meta(ge=1, le=10**6)] | None = None  # prompts in flight
    priority: Priority = 0  # the lowest, most urgent one that its requests may ask for
    weight: Annotated[int, Meta(ge=1, le=MAX_WEIGHT)] = 1  # share of capacity while clients wait
