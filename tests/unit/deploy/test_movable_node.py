"""Both halves of a movable node run until both have drained; the process ends with the error of either."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from common.errors import NodeRefused
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
def test_the_failure_of_one_half_ends_the_process(which: int, caplog: pytest.LogCaptureFixture) -> None:
    ended: list[tuple[int, str, bool]] = []
    pair = [Half(), Half()]
    pair[which].failure = RuntimeError("a defect")

    def end(code: int) -> None:
        ended.append((code, caplog.text, pair[1 - which].drained.is_set()))

    Halves(pair[0], pair[1], torch.device("cpu"), Log("flex-0"), end_process=end).run()
    ((code, logged, drained),) = ended
    assert code == 1
    assert "RuntimeError: a defect" in logged, "the log has the reason before the process ends"
    assert not drained, "nobody waits for the other half"


@pytest.mark.parametrize("which", [0, 1])
def test_a_half_that_no_router_takes_ends_the_node_once_the_other_has_drained(
    which: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair, logged = [Half(), Half()], list[str]()
    pair[which].failure = NodeRefused("flex-0 has pages of 32 tokens")

    def drain() -> None:
        logged.append(caplog.text)
        pair[1 - which].drained.set()

    monkeypatch.setattr(pair[1 - which], "drain", drain)
    with pytest.raises(NodeRefused, match="pages of 32"):
        halves(*pair).run()
    assert "no router takes a half" in logged[0], "draining may take long, and the log says why before"


@pytest.mark.parametrize("which", [0, 1])
def test_a_half_that_never_drains_holds_up_no_end(which: int) -> None:
    pair = [Half(), Half()]
    pair[which].failure = RuntimeError("a defect")
    pair[1 - which].drain = lambda: None  # type: ignore[method-assign]
    child = os.fork()
    if child == 0:
        try:
            halves(*pair).run()
        finally:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
