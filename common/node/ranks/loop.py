"""The main loop of a rank other than rank 0: applies plans in order, and runs the transfer service between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from common.node.ranks.board import Board, BoardField
from common.node.ranks.service import RankService, RankWork

BEAT_SECONDS = 0.1
IDLE_MS = 100
BUSY_MS = 1
# Seconds for which a rank of a GPU node looks for the next plan before it sleeps: a step is launched at once then.
SPIN_SECONDS = 0.05
# Looks for a plan between two turns of the service.
LOOKS = 64


class Frames(Protocol):
    """The reading end of the ring of plans."""

    def take(self) -> bytes | None: ...
    def clear(self) -> None: ...
    def fileno(self) -> int: ...


class RankLoop:
    """Runs until rank 0 sends an empty frame, which is the last one."""

    def __init__(
        self,
        plans: Frames,
        work: RankWork,
        service: RankService,
        wakes: Sequence[int],
        parent_ended: Callable[[], bool],
        show: Callable[[BoardField, int], None],
        spin_seconds: float = 0.0,
    ) -> None:
        """Apply the frames of `plans`.

        Args:
            wakes: further descriptors that end a wait.
            parent_ended: returns whether rank 0 has ended; the loop returns then.
            show: shows rank 0 a number.
            spin_seconds: for how long the loop looks for the next plan before it waits for a descriptor.
        """
        self._plans = plans
        self._work = work
        self._service = service
        self._wakes = wakes
        self._parent_ended = parent_ended
        self._show = show
        self._spin = spin_seconds
        self._turns = self._applied = 0

    def run(self) -> None:
        spin_until = 0.0
        while not self._parent_ended():
            frame = self._poll_plans() if time.monotonic() < spin_until else self._plans.take()
            self._turns += 1
            self._show(BoardField.TURNS, self._turns)
            if frame == b"":
                return
            # Commands to the service that precede a plan have to be known before it is applied.
            busy = self._service.turn(self._work.completed)
            if frame is not None:
                self._work.apply(frame)
                self._applied += 1
                self._show(BoardField.APPLIED, self._applied)
                spin_until = time.monotonic() + self._spin
            busy = self._work.turn() or busy
            if frame is None and time.monotonic() >= spin_until:
                self._wait(BUSY_MS if busy else IDLE_MS)

    def _poll_plans(self) -> bytes | None:
        """Look for a frame several times."""
        for _ in range(LOOKS):
            if (frame := self._plans.take()) is not None:
                return frame
        return None

    def _wait(self, timeout_ms: int) -> None:
        poller = zmq.Poller()
        for each in (self._plans.fileno(), *self._wakes, *self._service.sockets):
            poller.register(each, zmq.POLLIN)
        poller.poll(timeout_ms)
        self._plans.clear()


class Beat:
    """A thread that shows that this process runs."""

    def __init__(self, board: Board, rank: int, waited: Callable[[], float]) -> None:
        """Show it on the board as `rank`, and with it for how many seconds it has `waited` for the other ranks."""
        self._board = board
        self._waited = waited
        self._rank = rank
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        beats = 0
        while not self._stop.wait(BEAT_SECONDS):
            beats += 1
            self._board.write(self._rank, BoardField.BEAT, beats)
            self._board.write(self._rank, BoardField.WAITED_US, int(self._waited() * 1e6))
