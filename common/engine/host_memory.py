"""The size of this machine's memory."""

from __future__ import annotations

import os

GIB = 1 << 30


def host_memory() -> int:
    """Return the bytes of this machine's memory, used or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
