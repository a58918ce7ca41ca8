"""Shared memory files in /dev/shm: created by decode nodes, mapped by prefill nodes, always removed.

The name identifies the owner: tandem.<uid>.<pid namespace>.<pid>.<start ticks>.<incarnation>.<region>. A segment is
unlinked when its owner closes it; segments of a killed owner are removed by the next `sweep_orphans`, which sees from
the name that the owner is dead even if its pid was assigned to another process.

Others may remove a name while the owner lives: systemd-logind does so when the owner's user logs out (`RemoveIPC` in
logind.conf). Then peers find the segment among the open files of its owner.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import weakref
from pathlib import Path

from common.errors import ConfigError, HandshakeRefused
from common.exhaustion import EXHAUSTED
from kv_transfer.transport.one_host import process

SHM_DIR = Path("/dev/shm")

_ENLARGE = "enlarge it (docker: --shm-size, Kubernetes: an emptyDir of medium Memory)"
# What helps where no file can be created, besides another transport.
_REMEDIES = {
    errno.ENOENT: "mount a tmpfs there, or ",
    errno.EROFS: "mount it writable, or ",
    errno.EACCES: "let this user write there (chmod 1777), or ",
    errno.ENOSPC: f"remove files there, {_ENLARGE}, or ",
}
_NAME = re.compile(r"tandem\.(\d+)\.(\d+)\.(\d+)\.(\d+)\.([0-9a-f]{32})\.(kv|records)")


def segment_name(incarnation: str, region: str) -> str:
    me = process.current()
    return f"tandem.{os.getuid()}.{process.pid_namespace()}.{me.pid}.{me.started}.{incarnation}.{region}"


def is_of(name: str, owner: process.ProcessIdentity, incarnation: str) -> bool:
    """Return True if `owner` names its segments like this; paths and foreign files do not match."""
    match = _NAME.fullmatch(name)
    return match is not None and (match[3], match[4], match[5]) == (
        str(owner.pid),
        str(owner.started),
        incarnation,
    )


def create(name: str, nbytes: int) -> mmap.mmap:
    """Create a zeroed segment of mode 0600 with its memory reserved. Raises ConfigError if that is not possible."""
    path = SHM_DIR / name
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        remedy = _REMEDIES.get(error.errno or 0, "")
        raise ConfigError(
            "", f"{SHM_DIR} takes no KV pages ({error.strerror or error}): {remedy}use the tcp transport"
        ) from None
    try:
        # Without the reservation, a full /dev/shm kills this process at first touch.
        os.posix_fallocate(fd, 0, nbytes)
        return _map(fd, nbytes)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        if error.errno == errno.EFBIG:
            raise ConfigError(
                "",
                f"{nbytes >> 20} MiB of KV pages are more than a file may have here: raise ulimit -f, lower the number "
                "of pages, or use the tcp transport",
            ) from None
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        raise ConfigError(
            "",
            f"{SHM_DIR} has no room for {nbytes >> 20} MiB of KV pages: {_ENLARGE}, lower the number of pages, or use "
            "the tcp transport",
        ) from None
    finally:
        os.close(fd)


def attach(name: str, nbytes: int) -> mmap.mmap:
    """Map a peer's segment. Raises HandshakeRefused if it does not exist, is of another user or is too small.

    Raises OSError if this process lacks descriptors or memory.
    """
    try:
        try:
            fd = os.open(SHM_DIR / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = _open_removed(name)
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        raise HandshakeRefused(f"its shared memory cannot be opened ({error.strerror})") from None
    try:
        info = os.fstat(fd)
        if info.st_uid != os.getuid():
            raise HandshakeRefused(
                "its shared memory belongs to another user; run both nodes as the same user"
            )
        if info.st_size < nbytes:
            raise HandshakeRefused(f"its shared memory has {info.st_size} bytes, its layout needs {nbytes}")
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def _open_removed(name: str) -> int:
    """Open a segment whose name was removed while its owner has it open. Raises OSError."""
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(SHM_DIR / name))
    match = _NAME.fullmatch(name)
    if match is None or process.start_ticks(int(match[3])) != int(match[4]):
        raise missing
    for each in Path(f"/proc/{match[3]}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            if os.readlink(each) == f"{SHM_DIR / name} (deleted)":
                return os.open(each, os.O_RDWR | os.O_CLOEXEC)
    raise missing


def attach_owned(name: str, owner: process.ProcessIdentity, incarnation: str, nbytes: int) -> mmap.mmap:
    """Map a segment like `attach`. Raises HandshakeRefused even if `owner` does not name its segments like this."""
    if not is_of(name, owner, incarnation):
        raise HandshakeRefused(f"{name!r} is not the name of a segment that it created")
    return attach(name, nbytes)


def unlink(name: str) -> None:
    """Remove the name; mappings stay valid."""
    (SHM_DIR / name).unlink(missing_ok=True)


class OwnSegments:
    """The segments of this process, by region. Their names exist until `close`, since peers may attach at any time.

    A process that exits without `close`, such as one whose start has failed, removes them at exit: they take memory.
    """

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._maps: list[mmap.mmap] = []
        self.names: dict[str, str] = {}  # region -> name
        weakref.finalize(self, _remove, self.names, os.getpid())

    def create(self, region: str, nbytes: int) -> memoryview:
        name = segment_name(self._incarnation, region)
        mapped = create(name, nbytes)
        self.names[region] = name
        self._maps.append(mapped)
        return memoryview(mapped)

    def close(self) -> None:
        """Remove the names. A segment is unmapped when its last view is dropped."""
        _remove(self.names, os.getpid())
        self._maps.clear()


def _remove(names: dict[str, str], owner: int) -> None:
    """Remove the names, unless this is a forked child of the process that owns them."""
    if os.getpid() == owner:
        for name in names.values():
            unlink(name)
        names.clear()


def sweep_orphans() -> list[str]:
    """Remove segments of this user whose owner is dead; return the removed names. Called at start-up.

    Segments of another pid namespace (a container that shares /dev/shm) are kept: whether their owner is alive cannot
    be determined. So are those whose owner cannot be read now, and files of other users that have such a name. Raises
    ConfigError if /proc shows no owner under its pid.
    """
    process.check_proc()
    removed: list[str] = []
    for path in SHM_DIR.glob(f"tandem.{os.getuid()}.{process.pid_namespace()}.*"):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        with contextlib.suppress(OSError):
            if process.has_ended(int(match[3]), int(match[4])):
                path.unlink(missing_ok=True)
                removed.append(path.name)
    return removed


def _map(fd: int, nbytes: int) -> mmap.mmap:
    mapped = mmap.mmap(fd, nbytes)
    # A forked child could write after the death of its parent is proved.
    mapped.madvise(mmap.MADV_DONTFORK)
    return mapped
