"""The run directory of a cluster: sockets, pid files and logs, readable by its owner alone."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from common.config.load import Resolved
from common.errors import ConfigError


def run_directory(resolved: Resolved) -> Path:
    """Create (0700) and return it. Short on purpose: an ipc path holds at most 107 bytes.

    Raises ConfigError if it exists and belongs to somebody else.
    """
    configured = resolved.cluster.process.run_dir
    if configured != "auto":
        path = Path(os.path.expanduser(configured))
        path = path if path.is_absolute() else (resolved.file.parent / path).resolve()
    else:
        base = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/tandem-{os.getuid()}"
        tag = hashlib.sha256(str(resolved.file).encode()).hexdigest()[:8]
        path = Path(base) / f"{resolved.file.stem[:24]}-{tag}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for directory in (path, path.parent) if configured == "auto" else (path,):
        info = directory.stat()
        if info.st_uid not in (os.getuid(), 0):
            raise ConfigError("process.run_dir", f"{directory} belongs to another user; set process.run_dir")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        path.chmod(0o700)
    if len(str(path)) > 80:
        raise ConfigError(
            "process.run_dir", f"{path} is too long for ipc sockets; choose one under 80 characters"
        )
    return path


def control_address(resolved: Resolved) -> str:
    """Where the router binds its control socket and nodes connect."""
    configured = resolved.cluster.router.control_address
    return f"ipc://{run_directory(resolved)}/router.sock" if configured == "auto" else configured


def peer_address(resolved: Resolved, name: str) -> str:
    """Where the prefill node `name` binds its peer socket."""
    configured = resolved.cluster.prefill_node(name).peer_address
    return f"ipc://{run_directory(resolved)}/{name}.sock" if configured == "auto" else configured
