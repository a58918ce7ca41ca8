"""Finds operations that wait for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Make operations that wait for the GPU raise RuntimeError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
