"""Protection against web pages: checks the Host and Origin headers of requests and answers CORS preflights.

A page in a browser on this host can send requests to every loopback port and, by DNS rebinding, even under a host name
of its own. Without API keys, requests are therefore accepted only under a name that belongs to this router.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from aiohttp import web

from common.errors import Forbidden

ALLOWED_METHODS = "GET, POST"
EXPOSED = "X-Request-Id, request-id, Retry-After, X-Should-Retry, " + ", ".join(
    f"X-RateLimit-{what}-{of}" for what in ("Limit", "Remaining", "Reset") for of in ("Requests", "Tokens")
)
MAX_AGE_SECONDS = 600
MAX_REMEMBERED = 255  # characters of a Host header whose parts are remembered
MAX_ADDRESS = 64  # characters, with a zone
_REQUEST_HEADER = re.compile(
    r"(authorization|content-type|accept|user-agent|x-api-key|x-request-id|x-session-(id|token)|(openai|anthropic|x-stainless)-[a-z-]+)"
)


class Cors:
    """Lets pages of `origins` use the API; browsers block pages of all other origins."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def lists(self, origin: str) -> bool:
        return origin in self._origins

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return the answer to a CORS preflight request; None if this is not one."""
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        if not self.lists(request.headers.get("Origin", "")):
            raise Forbidden(
                "pages of this origin may not use this API; its operator can add it to router.cors_origins"
            )
        asked = request.headers.get("Access-Control-Request-Headers", "").lower().split(",")
        granted = [name for each in asked if _REQUEST_HEADER.fullmatch(name := each.strip())]
        headers = {
            "Access-Control-Allow-Methods": ALLOWED_METHODS,
            "Access-Control-Allow-Headers": ", ".join(granted),
            "Access-Control-Max-Age": str(MAX_AGE_SECONDS),
        }
        return web.Response(status=204, headers=headers)

    @property
    def allows_any(self) -> bool:
        """Return whether pages of any origin may use the API."""
        return bool(self._origins)

    def headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Return the CORS headers of an answer."""
        if not self._origins:
            return {}
        origin = request.headers.get("Origin", "")
        if not self.lists(origin):
            return {"Vary": "Origin"}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": EXPOSED,
        }


class HostRule:
    """Checks Host and Origin in clusters without API keys.

    `allowed` adds host names to the loopback names and to the address on which a request arrived.
    """

    def __init__(self, allowed: Sequence[str], cors: Cors) -> None:
        self._allowed = frozenset(_plain(host) for host in allowed)
        self._cors = cors

    def check(self, request: web.Request) -> None:
        """Raise Forbidden unless the request is allowed; the error names the config key that would allow it."""
        given = request.headers.getall("Host", [])
        if len(given) > 1:
            raise Forbidden("the request has several Host headers")
        # Browsers always send a Host header; a client without one is not a web page.
        host = _host_of(given[0]) if given else None
        if host is not None and not self._is_ours(host, request):
            raise Forbidden(
                f"{host[:100]!r} is not a name of this router; its operator can add it to "
                "router.allowed_hosts"
            )
        origin = request.headers.get("Origin")
        if origin is None or self._cors.lists(origin):
            return
        if not given or origin.lower() not in (f"http://{given[0].lower()}", f"https://{given[0].lower()}"):
            raise Forbidden(
                "pages of other origins may not use this router; its operator can add this one to router.cors_origins"
            )

    def _is_ours(self, host: str, request: web.Request) -> bool:
        if host in self._allowed or host == "localhost" or host.endswith(".localhost"):
            return True
        if len(host) > MAX_ADDRESS or (loopback := _is_loopback(host)) is None:
            return False
        if loopback or request.transport is None:
            return loopback
        bound = request.transport.get_extra_info("sockname")
        return bound is not None and host == _plain(bound[0])


def _host_of(header: str) -> str:
    """Return the host name of the Host header, without port; "" if it cannot be parsed."""
    return _parsed_host(header) if len(header) <= MAX_REMEMBERED else _parsed_host.__wrapped__(header)


@lru_cache(maxsize=1024)
def _parsed_host(header: str) -> str:
    try:
        return _plain(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return ""


@lru_cache(maxsize=1024)
def _is_loopback(host: str) -> bool | None:
    """Return whether an address is a loopback address; None if it is not an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return None


def _plain(host: str) -> str:
    host = host.lower().strip("[]").rstrip(".")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
