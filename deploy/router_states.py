"""Asks the router processes of this host about the cluster, and each of several whether it serves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from http.client import HTTPException
from typing import Any

import msgspec

from common.config import Resolved
from common.config.admin_listener import admin_listeners
from common.config.router_processes import names_of, names_router, router_index
from common.config.run_directory import own_socket
from deploy.admin_client import ask

INFO_SECONDS = 5.0
READY_SECONDS = 2.0


def server_info(resolved: Resolved) -> dict[str, Any] | None:
    """Return /server_info of the first router that answers, the one with the admin socket first; None without any."""
    try:
        admin = admin_listeners(resolved, to_write=False).socket
        # Those of other hosts do not exist on this one.
        sockets = [admin, *(own_socket(resolved, router_index(name)) for name in names_of(resolved.cluster))]
    except OSError:
        return None
    for socket in sockets:
        with contextlib.suppress(OSError, HTTPException, ValueError):
            _, raw = ask(socket, "GET", "/server_info", timeout=INFO_SECONDS)
            return msgspec.json.decode(raw, type=dict[str, Any])
    return None


def router_states(resolved: Resolved, processes: Iterable[str]) -> dict[str, str]:
    """Return the states of the routers among `processes`: up, not ready or does not answer. {} if there is only one."""
    routers = [name for name in processes if names_router(name)]
    if len(routers) < 2:
        return {}
    return {name: _state(resolved, router_index(name)) for name in routers}


def _state(resolved: Resolved, index: int) -> str:
    try:
        status, _ = ask(own_socket(resolved, index), "GET", "/ready", timeout=READY_SECONDS)
    except (OSError, HTTPException):
        return "does not answer"
    return "up" if status == 200 else "not ready"
