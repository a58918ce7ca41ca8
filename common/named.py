"""Resolves objects by name: tables of "module:attribute" import only what is chosen."""

from __future__ import annotations

import importlib
from typing import Any


def named(path: str) -> Any:
    """Return the object that "module:attribute" names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
