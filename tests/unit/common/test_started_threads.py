"""Pools whose threads start with their process."""

from __future__ import annotations

import threading

import pytest

from common.started_threads import started_threads
from tests.fakes.no_threads import allow_no_threads
from tests.fakes.waiting import PATIENCE, until


def test_a_pool_starts_no_thread_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with started_threads(3, "pool") as pool:
        allow_no_threads(monkeypatch)
        together = threading.Barrier(3)
        threads = {pool.submit(together.wait, PATIENCE) for _ in range(3)}
        assert {each.result(PATIENCE) for each in threads} == {0, 1, 2}


@pytest.mark.parametrize("allowed", [0, 2])
def test_a_pool_whose_threads_cannot_start_leaves_none(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    start, left = threading.Thread.start, iter(range(allowed))

    def refuse(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        started_threads(3, "unlucky")
    until(lambda: not any(each.name.startswith("unlucky") for each in threading.enumerate()))
