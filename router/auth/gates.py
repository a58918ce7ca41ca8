"""Authentication and authorization: each listener has one gate, which is asked before any handler runs.

- OpenGate: no API keys. It admits every client that reaches the address, except web pages of another origin.
- KeyGate: API keys. Every route except the probes and the page's files needs a key whose scopes cover it.
- OwnerGate: the admin socket, which only the owner of the cluster can open.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from common.api_key import ApiKey, Scope
from common.errors import Forbidden, RequestError, Unauthorized
from common.observability.logs import Log
from router.auth.keys import KeyRing
from router.auth.origin import Cors, HostRule
from router.auth.quotas import UNLIMITED, Quota, QuotaClaim, Quotas
from router.http.answer_headers import listener_headers_key
from router.http.client import Client, View, client_address, client_key
from router.http.errors import request_id_key
from router.http.matched_route import PROBES, matched_route
from router.page.routes import FILES

METRICS = "/metrics"
# The page for people, without any data. What it shows it fetches with the key that is typed into it.
PAGE = frozenset(("/", FILES))
# Orchestrators have no key either.
OPEN_ROUTES = PROBES | PAGE
ADMIN_ROUTES = frozenset((METRICS, "/flush_cache", "/reset_prefix_cache"))
# For every key, and not counted against its limits: a client at its limit must be able to end its requests.
UNLIMITED_ROUTES = frozenset(("/abort_request", "/abort_requests"))
LOG_SECONDS = 1.0  # shortest time between two log lines about refused clients
_READS = ("GET", "HEAD")
quota_claim_key: web.RequestKey[QuotaClaim] = web.RequestKey("quota_claim", QuotaClaim)
_quota_key: web.RequestKey[Quota] = web.RequestKey("quota", Quota)


class Gate(Protocol):
    """Decides about each request of one listener."""

    def probe_view(self, request: web.Request) -> View:
        """Return how much a probe, which carries no key, may see."""
        ...

    def enter(self, request: web.Request) -> tuple[Client, QuotaClaim]:
        """Identify the client and claim its quota. Raises Unauthorized, Forbidden or RateLimited."""
        ...


class OpenGate:
    """Admits clients without API keys. `view` is what they may see: the whole cluster if the address is loopback."""

    def __init__(self, hosts: HostRule, view: View, open_metrics: bool) -> None:
        self._hosts = hosts
        self._view = view
        self._hides_metrics = view < View.CLUSTER and not open_metrics

        @lru_cache(maxsize=4096)
        def client_at(remote: str) -> Client:
            return Client(client_address(remote), view)

        self._client_at = client_at

    def probe_view(self, request: web.Request) -> View:
        """Let a probe use any Host name; a request that fails the host rule sees nothing about the nodes."""
        try:
            self._hosts.check(request)
        except Forbidden:
            return View.SERVICE
        return self._view

    def enter(self, request: web.Request) -> tuple[Client, QuotaClaim]:
        self._hosts.check(request)
        if self._hides_metrics and matched_route(request) == METRICS:
            raise Forbidden("metrics are not public here; the operator can set security.open_metrics")
        return self._client_at(request.remote or ""), UNLIMITED


class KeyGate:
    """Admits clients by API key.

    `scope` is what every request on an admin listener needs. With None, reads need any key and everything else needs
    the scope `inference`.
    """

    def __init__(
        self, ring: KeyRing, quotas: Quotas, scope: Scope | None, shared_cache: bool, open_metrics: bool
    ) -> None:
        self._ring = ring
        self._quotas = quotas
        self._scope = scope
        self._shared_cache = shared_cache
        self._open_metrics = open_metrics

    def probe_view(self, request: web.Request) -> View:
        return View.SERVICE

    def enter(self, request: web.Request) -> tuple[Client, QuotaClaim]:
        """Admit a client by its key. Limits apply neither to reads, which are cheap, nor to aborts."""
        route, reads = matched_route(request), request.method in _READS
        if route == METRICS and self._open_metrics:
            return Client(address_of(request), View.SERVICE), UNLIMITED
        key = self._key_of(request)
        needed: Scope | None = "admin" if route in ADMIN_ROUTES else self._scope
        if needed is None and not reads and route not in UNLIMITED_ROUTES:
            needed = "inference"
        if needed is not None and needed not in key.scopes:
            raise Forbidden(f"API key {key.id} lacks the scope {needed}; see its scopes in security.api_keys")
        # By the key's hash, which clients of other keys cannot guess as they can its id: hashes of cached blocks begin
        # with it, and nodes may publish them (kv_events).
        tenant = "" if self._shared_cache else f"{key.id} {key.sha256}"
        client = Client(key.id, self._view_of(key), tenant, key.weight, key.priority)
        if reads or route in UNLIMITED_ROUTES:
            return client, UNLIMITED
        quota = request[_quota_key] = self._quotas.of(key)
        return client, quota.admit()

    def _view_of(self, key: ApiKey) -> View:
        if "admin" not in key.scopes:
            return View.SERVICE
        return View.CLUSTER if self._scope is None else View.OPERATOR

    def _key_of(self, request: web.Request) -> ApiKey:
        secret = _secret(request)
        key = self._ring.find(secret) if secret else None
        if key is None:
            given = "this API key is unknown or has expired" if secret else "no API key was given"
            raise Unauthorized(f"{given}; send Authorization: Bearer KEY, or x-api-key: KEY")
        return key


class OwnerGate:
    """Admits everyone with operator rights: only the owner of the cluster can open the socket."""

    def probe_view(self, request: web.Request) -> View:
        return View.OPERATOR

    def enter(self, request: web.Request) -> tuple[Client, QuotaClaim]:
        return Client("admin-socket", View.OPERATOR), UNLIMITED


class Entrance:
    """The middleware around all handlers of one listener: it applies CORS, the gate and the limits."""

    def __init__(self, gate: Gate, cors: Cors, log: Log, clock: Callable[[], float]) -> None:
        self._gate = gate
        self._cors = cors
        self._adds_headers = cors.allows_any or isinstance(gate, KeyGate)
        self._log = log
        self._clock = clock
        self._refused = 0  # since the last log line
        self._logged = -LOG_SECONDS

    @property
    def middleware(self) -> Middleware:
        """The middleware. It runs inside error_middleware, which turns its refusals into answers."""

        @web.middleware
        async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self._adds_headers:
                request[listener_headers_key] = self._headers
            answer = self._cors.preflight(request)
            if answer is not None:
                return answer
            if matched_route(request) in OPEN_ROUTES:
                request[client_key] = Client(address_of(request), self._gate.probe_view(request))
                return await handler(request)
            try:
                client, claim = self._gate.enter(request)
            except RequestError as error:
                self._log_refusal(request, error)
                raise
            request[client_key], request[quota_claim_key] = client, claim
            try:
                return await handler(request)
            finally:
                claim.release()

        return handle

    async def close(self, app: web.Application) -> None:
        """Log how many refusals no line has counted yet. Registered in Application.on_cleanup."""
        if self._refused:
            self._log.warning("refused a client: not logged individually", count=self._refused)

    def _headers(self, request: web.Request) -> dict[str, str]:
        """Return the CORS and quota headers of an answer."""
        quota = request.get(_quota_key)
        limits = {} if quota is None else quota.headers()
        return self._cors.headers(request) | limits

    def _log_refusal(self, request: web.Request, error: RequestError) -> None:
        """Log at most one line per LOG_SECONDS: a client can be refused arbitrarily often."""
        self._refused += 1
        now = self._clock()
        if now - self._logged >= LOG_SECONDS:
            self._log.warning(
                "refused a client",
                address=address_of(request),
                reason=str(error),
                request_id=request[request_id_key],
                refused=self._refused,
            )
            self._refused, self._logged = 0, now


def address_of(request: web.BaseRequest) -> str:
    """Return the peer's address in the form by which quotas and fair shares count clients."""
    return client_address(request.remote or "")


def _secret(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return request.headers.get("x-api-key", "").strip()
