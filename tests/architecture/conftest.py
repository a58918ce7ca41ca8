"""Fixtures of the architecture tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """Switch the collector off: it would take most of the time, looking for garbage among a million syntax nodes."""
    gc.disable()
    yield
    gc.enable()
