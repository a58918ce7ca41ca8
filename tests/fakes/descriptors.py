"""Lists the descriptors of this process."""

from __future__ import annotations

import gc
import os


def open_descriptors() -> set[str]:
    """Return the open descriptors, without those of garbage: it may be that of an earlier test, and go at any time."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))
