"""Asks each of several router processes of this host whether it serves: the admin socket answers for one of them."""

from __future__ import annotations

from collections.abc import Iterable
from http.client import HTTPException

from common.config import Resolved
from common.config.router_processes import names_router
from common.config.run_directory import own_socket
from deploy.admin_client import ask

ANSWER_SECONDS = 2.0


def router_states(resolved: Resolved, processes: Iterable[str]) -> dict[str, str]:
    """Return the states of the routers among `processes`: up, not ready or does not answer. {} if there is only one."""
    routers = [name for name in processes if names_router(name)]
    if len(routers) < 2:
        return {}
    return {name: _state(resolved, int(name.partition(".")[2] or 0)) for name in routers}


def _state(resolved: Resolved, index: int) -> str:
    try:
        status, _ = ask(own_socket(resolved, index), "GET", "/ready", timeout=ANSWER_SECONDS)
    except (OSError, HTTPException):
        return "does not answer"
    return "up" if status == 200 else "not ready"
