"""Checks from where HTTP can be reached: access from other hosts must be protected or explicitly allowed."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from common.config.schema import Cluster
from common.errors import ConfigError

ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9]([a-z0-9.-]*[a-z0-9])?)(:[0-9]{1,5})?")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f]*(:[0-9A-Fa-f]*){2,7}")


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach a socket bound to `host`. False for names other than localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_http(cluster: Cluster) -> None:
    """Raise ConfigError with the remedy if HTTP is open to others, or its keys contradict each other."""
    _check_tls(cluster)
    _check_bind(cluster)
    _check_admin(cluster)
    for index, host in enumerate(cluster.router.allowed_hosts):
        if not HOST.fullmatch(host):
            raise ConfigError(
                f"router.allowed_hosts[{index}]",
                f"{host!r} is not the name or address of a host; write it without scheme, port and path",
            )
    for index, origin in enumerate(cluster.router.cors_origins):
        if not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"router.cors_origins[{index}]",
                f"{origin!r} is not an origin; write scheme and host as browsers send them, such as "
                "https://chat.example.com, one entry per origin: there is no wildcard",
            )


def _check_tls(cluster: Cluster) -> None:
    tls = cluster.router.tls
    if (tls.cert is None) != (tls.key is None):
        missing = "cert" if tls.cert is None else "key"
        raise ConfigError(
            f"router.tls.{missing}", "a certificate and its private key go together; name both files"
        )
    if tls.client_ca is not None and tls.cert is None:
        raise ConfigError(
            "router.tls.client_ca", "certificates of clients need TLS; set router.tls.cert and router.tls.key"
        )


def _check_bind(cluster: Cluster) -> None:
    router, security = cluster.router, cluster.security
    if is_loopback(router.host) or security.open_http:
        return
    if security.api_keys is None and router.tls.client_ca is None:
        raise ConfigError(
            "router.host",
            f"{router.host} can be reached from other hosts, and clients need no key: make keys with deploy/api_key "
            "and set security.api_keys, or bind to 127.0.0.1; security.open_http: true admits everyone who can reach "
            "it",
        )
    if router.tls.cert is None and not security.plain_http:
        raise ConfigError(
            "router.host",
            f"{router.host} can be reached from other hosts, and API keys and prompts would cross the network "
            "unencrypted: set router.tls.cert and router.tls.key; security.plain_http: true says that a "
            "proxy in front terminates TLS",
        )


def _check_admin(cluster: Cluster) -> None:
    admin, key = cluster.router.admin, "router.admin"
    if admin == "auto" or (admin.startswith("unix:") and admin != "unix:"):
        return
    place = admin_address(admin)
    if place is None:
        raise ConfigError(key, f"{admin!r} is not a listener; write auto, unix:PATH or http://127.0.0.1:PORT")
    if not is_loopback(place[0]):
        raise ConfigError(
            key,
            f"{place[0]} is not a loopback address; write http://127.0.0.1:PORT, and reach it through SSH",
        )
    if cluster.security.api_keys is None:
        raise ConfigError(
            key,
            "every user of this host can reach an HTTP port: make a key with deploy/api_key --scope admin and set "
            "security.api_keys, or write auto for a Unix socket that only its owner can open",
        )
    if place[1] == cluster.router.port:
        raise ConfigError(key, f"port {place[1]} is router.port; choose another")


def admin_address(admin: str) -> tuple[str, int] | None:
    """Return (host, port) of `router.admin: http://HOST:PORT`, else None."""
    try:
        parts = urlsplit(admin)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme != "http" or not parts.hostname or not port or admin.count("/") > 2:
        return None
    return parts.hostname, port
