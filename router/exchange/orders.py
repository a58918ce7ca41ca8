"""The bodies that router processes of one host send to each other, as JSON."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_ORDERED = 256  # ids in one order
Identity = Annotated[str, Meta(max_length=256)]


class AbortOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks to abort requests of one client by their ids, or all requests of all clients if `client` is None."""

    client: str | None
    ids: Annotated[tuple[Identity, ...], Meta(max_length=MAX_ORDERED)] = ()


class PauseOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks to refuse new requests, or to take them again."""

    paused: bool
