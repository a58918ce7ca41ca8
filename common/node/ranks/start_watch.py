"""Notices a rank that is stopped while the ranks of a node start.

Loading has no such bound: a rank shows its first beat before it builds its model, and its beats go on meanwhile. One
that runs and makes no progress ends itself (start_watchdog.py), and says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from common.errors import RankFailed
from common.node.ranks.board import Board, BoardField
from common.node.ranks.watchdog import RankMeter, stopped

# Until the first beat: for the imports of a rank, from a slow disk.
FIRST_BEAT_SECONDS = 300.0
# Without a further beat: a rank may be kept from showing one while it compiles or allocates.
STOPPED_SECONDS = 120.0


class StartWatch:
    """Looks at ranks 1 and up while they start. It counts only time in which rank 0 itself ran."""

    def __init__(
        self, pids: Sequence[int], board: Board, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Watch the processes `pids`, in the order of their ranks."""
        self._pids = pids
        self._board = board
        self._first_beat = FIRST_BEAT_SECONDS
        self._firsts = [RankMeter(self._first_beat) for _ in pids]
        self._beats = [RankMeter(STOPPED_SECONDS) for _ in pids]
        self._clock = clock
        self._looked = clock()

    def begin(self, hang_timeout: float) -> None:
        """Begin to wait for the first beats, at least as long as a start may be without progress; 0: without end."""
        self._first_beat = max(hang_timeout, FIRST_BEAT_SECONDS) if hang_timeout else 0.0
        self._firsts = [RankMeter(self._first_beat) for _ in self._pids]

    def steps(self) -> int:
        """Return how much progress the ranks have shown, for comparison with a later call."""
        return sum(self._board.read(rank, BoardField.STEPS) for rank in range(1, len(self._pids) + 1))

    def check(self) -> None:
        """Raise RankFailed for a rank without a sign of life. Call it often: at most 0.2 s count per call."""
        now = self._clock()
        passed, self._looked = now - self._looked, now
        for rank, pid in enumerate(self._pids, start=1):
            beat = self._board.read(rank, BoardField.BEAT)
            if beat:
                if self._beats[rank - 1].exceeded(beat, passed):
                    raise RankFailed(rank, f"{stopped(rank)}; its start: {self._board.read_text(rank)}")
            elif self._firsts[rank - 1].exceeded(beat, passed):
                raise RankFailed(
                    rank,
                    f"rank {rank} (process {pid}) has shown no sign of life in {self._first_beat:.0f} s: let it"
                    " continue if it is stopped, see whether the disk with its Python packages is slow, and start the"
                    " node again",
                )
