"""Who sent a request: what handlers may know of it, once one of router.auth's gates has let it in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import msgspec
from aiohttp import web


class View(IntEnum):
    """How much of the cluster a client is shown; each level holds the ones below it."""

    SERVICE = 0  # the model, and its own requests
    CLUSTER = 1  # nodes by name, their load, metrics, the configuration
    OPERATOR = 2  # processes, hosts and incarnations, too


@dataclass(frozen=True, slots=True)
class Client:
    """`name` stands in logs and timelines, and is what shares of the cluster go by."""

    name: str  # API key id, or the client's address where there are no keys
    view: View
    tenant: str = ""  # whose prompts share cached pages; "": everybody's
    weight: int = 1  # shares of the cluster that it gets while clients wait for room


client_key: web.RequestKey[Client] = web.RequestKey("client", Client)


def cache_salt(tenant: str, asked: str | None) -> bytes:
    """The salt of a request's cached pages: by tenant and by the request's own `cache_salt`, which never leaves it."""
    if not tenant and asked is None:
        return b""
    return hashlib.sha256(msgspec.msgpack.encode((tenant, asked))).digest()[:16]
