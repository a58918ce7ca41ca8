"""Ends a child process when the process that started it has ended, however that came about."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable
from functools import partial

_PR_SET_PDEATHSIG = 1
# Resolved before any fork: between fork and exec hardly anything is safe to call.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def at_parent_death(number: signal.Signals) -> Callable[[], object]:
    """Return a `preexec_fn` for a child that gets this signal once the thread that starts it has ended."""
    return partial(_prctl, _PR_SET_PDEATHSIG, int(number))
