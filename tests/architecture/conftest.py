"""Fixtures of the architecture tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """Switch the collector off: it would take most of the time, looking for garbage among a million syntax nodes.

    For a module: without packages a fixture of that scope would last until all other tests of the process are over.
    """
    gc.disable()
    yield
    gc.enable()
