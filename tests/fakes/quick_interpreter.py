"""Lets Triton's interpreter replace the functions of `triton.language` once for each module that declares kernels.

Without it, the interpreter examines every member of `triton.language` at each launch, and at each call of a function
by a kernel, where nothing is left to replace. That takes half of the time of a test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any


class _Nothing:
    """What a launch undoes at its end."""

    def restore(self) -> None:
        pass


class ReplacedOnce:
    """Stands for the interpreter's own `replace`, which it calls with the function that is about to run."""

    def __init__(self, replace: Callable[[FunctionType], Any]) -> None:
        self._replace = replace
        self._done: set[int] = set()

    def __call__(self, function: FunctionType) -> _Nothing:
        # By identity, which stays: the interpreter keeps each function, and so its module's globals.
        module = id(function.__globals__)
        if module not in self._done:
            self._replace(function)
            self._done.add(module)
        return _Nothing()


def install() -> None:
    """Install it if kernels run in the interpreter and this process has imported it. Further calls do nothing."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or os.environ.get("TRITON_INTERPRET") != "1":
        return
    if not isinstance(interpreter._patch_lang, ReplacedOnce):
        interpreter._patch_lang = ReplacedOnce(interpreter._patch_lang)
