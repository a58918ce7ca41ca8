"""Objects by name: tables of "module:attribute" import what is chosen, and nothing else."""

from __future__ import annotations

import importlib
from typing import Any


def named(path: str) -> Any:
    """What "module:attribute" names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
