"""The memory that processes of this machine, or of this container, can have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

GIB = 1 << 30
_OWN: Final = Path("/proc/self/cgroup")
_MOUNTED: Final = Path("/sys/fs/cgroup")


def host_memory(own: Path = _OWN, mounted: Path = _MOUNTED) -> int:
    """Return the bytes of this machine's memory, used or not, or of what the cgroups of this process allow if less.

    A container that takes more than it is allowed is killed without a word, whatever the machine has.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits(own, mounted)])


def _limits(own: Path, mounted: Path) -> Iterator[int]:
    """Yield the limits of the cgroups of this process and of those above them, of either version."""
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = mounted, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mounted / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container, the path may be that of the host, which is not mounted here.
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            limit = _text(root.joinpath(*parts[:depth], name)).strip()
            if limit.isdecimal():
                yield int(limit)


def _text(file: Path) -> str:
    """Return the content of a file of the kernel; "" without it."""
    try:
        return file.read_text()
    except OSError:
        return ""
