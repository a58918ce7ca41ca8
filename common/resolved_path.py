"""Follows symbolic links, also where they form a loop."""

from __future__ import annotations

import os
from pathlib import Path


def resolved_path(path: Path) -> Path:
    """Return the absolute path without symbolic links. Of a loop it keeps the links: opening it raises OSError.

    `Path.resolve` of Python 3.11 and 3.12 raises RuntimeError for a loop, which no reader of files expects.
    """
    return Path(os.path.realpath(path))
