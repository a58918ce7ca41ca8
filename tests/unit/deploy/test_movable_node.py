"""Both halves of a movable node run until both have drained; the process ends with the error of either."""

from __future__ import annotations

import threading

import pytest
import torch

from common.observability.logs import Log
from deploy.movable_node.halves import Halves
from tests.fakes.waiting import PATIENCE


class Half:
    """Runs until it is drained, or fails at once."""

    def __init__(self, failure: Exception | None = None, overdue: float = 0.0) -> None:
        self.failure = failure
        self.late = overdue
        self.calls: list[str] = []
        self.running = threading.Event()
        self.drained = threading.Event()

    def start(self) -> None:
        self.calls.append("start")

    def run(self) -> None:
        self.running.set()
        if self.failure is not None:
            raise self.failure
        assert self.drained.wait(PATIENCE)

    def overdue(self) -> float:
        return self.late

    def drain(self) -> None:
        self.drained.set()

    def close(self) -> None:
        self.calls.append("close")


def halves(prefill: Half, decode: Half) -> Halves:
    return Halves(prefill, decode, torch.device("cpu"), Log("flex-0"))


def test_it_runs_until_both_have_drained() -> None:
    prefill, decode = Half(overdue=2.0), Half(overdue=3.0)
    node = halves(prefill, decode)
    node.start()
    thread = threading.Thread(target=node.run)
    thread.start()
    assert prefill.running.wait(PATIENCE)
    assert decode.running.wait(PATIENCE)
    assert node.overdue() == 3.0
    node.drain()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert node.overdue() == 0.0, "loops that have ended are not late"
    node.close()
    assert prefill.calls == decode.calls == ["start", "close"]


@pytest.mark.parametrize("which", [0, 1])
def test_the_failure_of_one_half_drains_the_other(which: int, caplog: pytest.LogCaptureFixture) -> None:
    class Draining(Half):
        def drain(self) -> None:
            said.append(caplog.text)
            super().drain()

    said: list[str] = []
    pair: list[Half] = [Draining(), Draining()]
    pair[which] = Half(RuntimeError("a defect"))
    with pytest.raises(RuntimeError, match="a defect"):
        halves(*pair).run()
    assert pair[1 - which].drained.is_set()
    assert "a defect" in said[0], "the log has the reason before the other half has drained"
