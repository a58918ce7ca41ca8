"""The identity of a client, as a gate (router/auth) has established it and handlers may see it."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import msgspec
from aiohttp import web

from common.messages.generation import MAX_PRIORITY


class View(IntEnum):
    """The part of the cluster that a client may see; each level includes the levels below it."""

    SERVICE = 0  # the model and its own requests
    CLUSTER = 1  # also node names, their load, metrics and the configuration
    OPERATOR = 2  # also processes, hosts and incarnations


@dataclass(frozen=True, slots=True)
class Client:
    """A client. `name` appears in logs and timelines and identifies the client for fair shares."""

    name: str  # API key id, or the client's address where there are no keys
    view: View
    tenant: str = ""  # only prompts of one tenant share cached pages; "" is shared by everyone
    weight: int = 1  # its share of the cluster relative to other waiting clients
    most_urgent: int = -MAX_PRIORITY  # the lowest priority that its requests may have


SESSION_HEADERS = ("X-Session-Id", "X-Session-Token")  # as in llm-d; the first one that is given counts
client_key: web.RequestKey[Client] = web.RequestKey("client", Client)


def cache_salt(tenant: str, asked: str | None) -> bytes:
    """Derive the salt of a request's cached pages from its tenant and its `cache_salt` field."""
    if not tenant and asked is None:
        return b""
    return hashlib.sha256(msgspec.msgpack.encode((tenant, asked))).digest()[:16]


def session_key(client: Client, headers: Mapping[str, str], session_id: str | None = None) -> bytes:
    """Return the key of the conversation that a request names; b"" if it names none.

    Two clients never share a session, whatever they send.

    `session_id`: a field of the body, which counts before headers.
    """
    for given in (session_id, *map(headers.get, SESSION_HEADERS)):
        if given and (named := given.strip()):
            return hashlib.sha256(msgspec.msgpack.encode((client.name, named))).digest()[:16]
    return b""


@lru_cache(maxsize=4096)
def client_address(text: str) -> str:
    """Return one name per client: for IPv6 its /64 network, because one host may have all addresses of it."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return text if address.is_loopback else str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
