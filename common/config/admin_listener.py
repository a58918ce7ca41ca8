"""The addresses on which the router accepts operators' requests: a Unix socket and, optionally, a local HTTP port."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from common.config.http_exposure import admin_address
from common.config.load import Resolved
from common.config.run_directory import ADMIN, MAX_SOCKET_BYTES, run_directory
from common.errors import ConfigError
from common.resolved_path import resolved_path


@dataclass(frozen=True, slots=True)
class AdminListeners:
    """The Unix socket always exists: deploy/up and deploy/status use it."""

    socket: Path
    address: tuple[str, int] | None  # host and port of plain HTTP, for keys with the scope admin


def admin_socket(resolved: Resolved) -> Path:
    """Return the Unix socket at which the routers of this host answer operators. Raises ConfigError."""
    return admin_listeners(resolved, to_write=False).socket


def admin_listeners(resolved: Resolved, to_write: bool = True) -> AdminListeners:
    """Return the listeners. `to_write` says whether the caller writes to the run directory.

    Raises ConfigError if the path of the socket is too long.
    """
    admin = resolved.cluster.router.admin
    if not admin.startswith("unix:"):
        return AdminListeners(run_directory(resolved, to_write) / f"{ADMIN}.sock", admin_address(admin))
    path = Path(os.path.expanduser(admin.removeprefix("unix:")))
    path = path if path.is_absolute() else resolved_path(resolved.file.parent / path)
    if len(os.fsencode(path)) > MAX_SOCKET_BYTES:
        raise ConfigError(
            "router.admin", f"{path} has more than {MAX_SOCKET_BYTES} bytes; choose a shorter path"
        )
    return AdminListeners(path, None)
