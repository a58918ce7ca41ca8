"""A process that has reached the limit of its threads, which a container counts over all its processes."""

from __future__ import annotations

import threading

import pytest


def allow_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread start until `monkeypatch` is undone."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
