"""Asks the router processes of this host about the cluster, and each of several whether it serves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec

from common.config import Resolved
from common.config.admin_listener import admin_socket
from common.config.router_processes import names_of, names_router
from common.config.run_directory import own_socket_in, run_directory
from deploy.admin_client import ask

INFO_SECONDS = 5.0
READY_SECONDS = 2.0


def sockets_of(resolved: Resolved) -> tuple[Path, ...]:
    """Return the sockets of this host at which routers of a cluster answer. Raises ConfigError."""
    run_dir = run_directory(resolved)
    # Those of other hosts do not exist on this one.
    own = (own_socket_in(run_dir, name) for name in names_of(resolved.cluster))
    return (admin_socket(resolved), *own)


def server_info(sockets: Iterable[Path]) -> dict[str, Any] | None:
    """Return /server_info of the first router that answers at one of the sockets; None without any."""
    for socket in sockets:
        with contextlib.suppress(OSError, HTTPException, ValueError):
            _, raw = ask(socket, "GET", "/server_info", timeout=INFO_SECONDS)
            return msgspec.json.decode(raw, type=dict[str, Any])
    return None


def router_states(run_dir: Path, processes: Iterable[str]) -> dict[str, str]:
    """Return the states of the routers among `processes`: up, not ready or does not answer. {} if there is only one."""
    routers = [name for name in processes if names_router(name)]
    if len(routers) < 2:
        return {}
    return {name: _state(own_socket_in(run_dir, name)) for name in routers}


def _state(socket: Path) -> str:
    try:
        status, _ = ask(socket, "GET", "/ready", timeout=READY_SECONDS)
    except (OSError, HTTPException):
        return "does not answer"
    return "up" if status == 200 else "not ready"
