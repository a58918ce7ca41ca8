"""Leaves out work of Triton's interpreter that has no effect and takes more than half of a kernel test's time.

- It examines every member of `triton.language` at each launch, and at each call of a function by a kernel, to replace
  what it has already replaced. Here it does so once for each module that declares kernels.
- It computes every sum, difference and product of integers a second time to find overflows, and then drops what it
  found, unless its option `debug` is set.
- It builds a table of all types for each array.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
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


class TypesOnce:
    """Remembers the interpreter's answers to which type of NumPy holds the elements of a type of Triton."""

    def __init__(self, find: Callable[[Any], Any]) -> None:
        self._find = find
        self._found: dict[str, Any] = {}

    def __call__(self, kind: Any) -> Any:
        name = kind.scalar.name
        if name not in self._found:
            self._found[name] = self._find(kind)
        return self._found[name]


def install() -> None:
    """Install it if kernels run in the interpreter and this process has imported it. Further calls do nothing."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or os.environ.get("TRITON_INTERPRET") != "1":
        return
    if isinstance(interpreter._patch_lang, ReplacedOnce):
        return
    interpreter._patch_lang = ReplacedOnce(interpreter._patch_lang)
    interpreter._get_np_dtype = TypesOnce(interpreter._get_np_dtype)
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
