"""The run directory of a cluster: sockets, pid files and logs, readable only by its owner."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from common.config.load import Resolved
from common.config.node_entries import own_peer_address
from common.config.router_processes import derived_addresses, names_of, router_name
from common.config.schema import PrefillNodeEntry
from common.errors import ConfigError
from common.resolved_path import resolved_path

KEY = "process.run_dir"
ADMIN = "router.admin"  # name of the router's admin socket; no node has this name, since node names contain no dots
LOGIN_DIRECTORIES = Path("/run/user")  # one for each user who is logged in
# Where the base of all run directories cannot be used; deploy/up MODEL has no cluster file yet.
BASE_REMEDY = (
    f"set {KEY}, or for deploy/up MODEL set XDG_RUNTIME_DIR to a private directory outside /run/user"
)
MAX_SOCKET_BYTES = 107  # sockaddr_un.sun_path without its terminator


def run_directory(resolved: Resolved, to_write: bool = False) -> Path:
    """Create (0700) and return the directory. Its path is short on purpose, since it contains sockets.

    Raises ConfigError if it cannot be created, belongs to another user, or is too long for its sockets; with
    `to_write` also if it is read-only. Nodes of a running cluster start without `to_write`: not all of them create
    files in it.
    """
    configured = resolved.cluster.process.run_dir
    try:
        path = _place(configured, resolved.file)
        _own(path, follow=configured != "auto")
    except OSError as error:
        raise ConfigError(KEY, f"cannot make {error.filename}: {error.strerror}; set {KEY}") from error
    if to_write and not os.access(path, os.W_OK | os.X_OK):
        raise unwritable(path, "it is read-only for this user")
    names = [
        ADMIN,
        *(f"{each}.own" for each in names_of(resolved.cluster)),
        *(node.name for node in resolved.cluster.prefill.nodes),
    ]
    longest = path / f"{max(names, key=len)}.sock"
    if len(os.fsencode(longest)) > MAX_SOCKET_BYTES:
        raise ConfigError(
            KEY,
            f"{path} is too long: {longest.name} in it would have more than {MAX_SOCKET_BYTES} bytes, the maximum of a "
            "socket's path; choose a shorter directory",
        )
    return path


def existing_run_directory(configured: str, file: Path) -> Path | None:
    """Return the directory that a value of process.run_dir means for a cluster file; None if it does not exist.

    Raises ConfigError if others own it or can write to it.
    """
    try:
        path = _place(configured, file)
        if not path.is_dir():
            return None
        _own(path, follow=configured != "auto")
    except OSError as error:
        raise ConfigError(KEY, f"cannot use {error.filename}: {error.strerror}; set {KEY}") from error
    return path


def _place(configured: str, file: Path) -> Path:
    if configured == "auto":
        tag = hashlib.sha256(os.fsencode(file)).hexdigest()[:8]
        return runtime_base() / f"{file.stem[:24]}-{tag}"
    path = Path(os.path.expanduser(configured))
    return path if path.is_absolute() else resolved_path(file.parent / path)


def unwritable(path: Path, problem: str) -> ConfigError:
    """Return the error for a run directory in which files cannot be created, with the path and the remedy."""
    return ConfigError(
        KEY,
        f"cannot write to {path}: {problem}; free space or allow write access, or set {KEY} to another directory",
    )


def runtime_base() -> Path:
    """Return the parent of all run directories, which no other user can write to, so nobody can replace their files."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    private = runtime.is_dir() and runtime.stat().st_uid == os.getuid() and not runtime.stat().st_mode & 0o022
    # A cluster may outlive the login of its user, and its sockets and files must, too.
    if private and resolved_path(runtime).parent != LOGIN_DIRECTORIES:
        return runtime
    base = Path(f"/tmp/tandem-{os.getuid()}")  # even if sudo or su kept another user's XDG_RUNTIME_DIR
    _own(base, follow=False, remedy=BASE_REMEDY)
    return base


def _own(directory: Path, follow: bool, remedy: str = f"set {KEY}") -> None:
    """Create it if necessary, and make it unreadable for others. Refuses a directory that others own or can write to.

    `follow`: a configured link is intended; a link found in /tmp may be an attack.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.stat(follow_symlinks=follow)
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(KEY, f"{directory} is not a directory; remove it, or {remedy}")
    if info.st_uid != os.getuid():
        raise ConfigError(KEY, f"{directory} belongs to another user; {remedy}")
    if info.st_mode & 0o022:
        raise ConfigError(KEY, f"others can write to {directory}; chmod 700 it, or {remedy}")
    if info.st_mode & 0o055:
        directory.chmod(0o700)


def control_addresses(resolved: Resolved) -> list[str]:
    """Return the addresses at which the router processes bind their control sockets and to which nodes connect."""
    router = resolved.cluster.router
    automatic = router.control_address == "auto"
    return derived_addresses(router, run_directory(resolved) if automatic else Path("/"))


def own_socket(resolved: Resolved, index: int) -> Path:
    """Return the Unix socket of one router process, by which the others of its host ask it."""
    return own_socket_in(run_directory(resolved), router_name(index))


def own_socket_in(run_dir: Path, name: str) -> Path:
    """Return the Unix socket of the router process of this name."""
    return run_dir / f"{name}.own.sock"


def use_file(resolved: Resolved, index: int) -> Path:
    """Return the file in which one router process counts the use of API keys, for the others of its host."""
    return run_directory(resolved) / f"{router_name(index)}.use"


def entry_peer_address(resolved: Resolved, entry: PrefillNodeEntry) -> str:
    """Return the address of an entry of the cluster file. Its host may be `own`, and its path a pattern of names."""
    if entry.peer_address == "auto":
        return f"ipc://{run_directory(resolved)}/{entry.name}.sock"
    return entry.peer_address


def peer_address(resolved: Resolved, name: str, rank: int = 0) -> str:
    """Return the address at which a rank of the prefill node `name` binds its peer socket.

    Decode nodes learn those of other ranks than rank 0 from the node, so these take any free port.
    """
    cluster = resolved.cluster
    configured = entry_peer_address(resolved, cluster.prefill_node(name))
    configured = own_peer_address(cluster, configured, f"prefill.nodes[{name}].peer_address")
    if not rank:
        return configured
    if configured.startswith("ipc://"):
        return f"{configured}.{rank}"
    return f"{configured.rpartition(':')[0]}:0"


def event_directory(resolved: Resolved) -> Path | None:
    """Return where processes append their events; None: nowhere. A relative path is relative to the cluster file."""
    configured = resolved.cluster.process.event_log
    if configured == "none":
        return None
    if configured == "auto":
        return run_directory(resolved) / "events"
    return resolved.file.parent / os.path.expanduser(configured)


def profile_directory(resolved: Resolved) -> Path:
    """Create and return the directory of profiles. Raises ConfigError if it cannot be written to."""
    directory = run_directory(resolved, to_write=True) / "profiles"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise unwritable(directory, error.strerror or str(error)) from error
    return directory
