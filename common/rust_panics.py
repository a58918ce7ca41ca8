"""Recognises panics of libraries that are written in Rust."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    """Return whether a library's Rust code has panicked: PyO3 raises a BaseException whose class nobody can import."""
    return type(error).__name__ == "PanicException"
