"""Moves the current thread into a network namespace."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNET = 0x40000000


def enter_network(path: str) -> None:
    """Enter the network namespace at `path`, also for threads that this one starts. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(descriptor)
