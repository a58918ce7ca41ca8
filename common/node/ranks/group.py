"""The ranks of a node as rank 0 sees them: exchanges what they have to agree on, and ends their processes."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from common.engine.collectives.group import CollectiveGroup
from common.engine.collectives.group_ranks import GroupRanks
from common.engine.collectives.shared_memory_group import SharedMemoryGroup
from common.engine.layers.ranks import DivideExperts
from common.errors import ConfigError, InternalError, ModelError, RankFailed, TandemError
from common.ipc.ring import RingReader, RingWriter
from common.messages.identity import RankTotals
from common.node.ranks.board import BoardField
from common.node.ranks.device_group import PeerRuntime, RankCollectives
from common.node.ranks.member import READY, START_SECONDS
from common.node.ranks.messages import Gathered, Loading, StartFailed
from common.node.ranks.processes import END_SECONDS, RankProcesses
from common.node.ranks.start_channel import SEND_SECONDS
from common.node.ranks.start_watch import StartWatch
from common.node.ranks.watchdog import LOOK_SECONDS, RankWatch, rank_watchdog
from common.observability.logs import Log
from common.observability.start_progress import progressed, waiting_for_ranks
from common.observability.startup import Phase

PLAN_SECONDS = 5.0  # for a rank to make room in a full ring of plans


class RankGroup:
    """Owned by the main thread of rank 0."""

    def __init__(self, node: str, started: RankProcesses, report: Callable[[Phase, int, int], None]) -> None:
        """Take over the processes of the other ranks. `report` is told the progress of all ranks together."""
        self._node = node
        self._started = started
        self.size = started.size
        self.board = started.board
        ranks = range(1, self.size)
        self.plans = RingWriter(started.plans, "the plans", ranks)
        self.commands = RingWriter(started.commands, "the commands", ranks)
        self.events = [
            RingReader(ring, 0, "the events", rank) for rank, ring in zip(ranks, started.events, strict=True)
        ]
        self._collectives = RankCollectives(SharedMemoryGroup(started.own))
        self.processes = started.processes
        self._channels = started.channels
        self._loading = [(0, 0)] * self.size  # bytes read and to read, of each rank
        self._given: dict[int, bytes] = {}  # in the exchange that goes on, by rank
        self._report = report
        self._serving = False
        self._sent = 0  # plans
        self._watch = StartWatch([process.pid for process in self.processes], self.board)

    @property
    def group(self) -> CollectiveGroup:
        """Combines tensors of all ranks; on GPUs only after `connect`."""
        return self._collectives.group

    def ranks(self, divide_experts: DivideExperts) -> GroupRanks:
        return GroupRanks(self.group, divide_experts)

    def connect(self, device: torch.device, runtime: Callable[[], PeerRuntime], log: Log) -> None:
        """Connect this rank's device with those of the others. See `RankCollectives.connect`."""
        self._collectives.connect(device, runtime, self.exchange, log)

    def begin(self, works: Sequence[bytes], log_level: str, hang_timeout: float) -> None:
        """Tell ranks 1 and up what they are; see `RankProcesses.begin`."""
        self._watch.begin(hang_timeout)
        self._started.begin(self._node, works, log_level, hang_timeout)

    def report(self, phase: Phase, done: int = 0, total: int = 0) -> None:
        """Report the phase of rank 0; loading is that of all ranks. Raises what `exchange` does."""
        if phase != "loading":
            self._report(phase, done, total)
            return
        self._loading[0] = done, total
        self._take(0.0)
        self._watch.check()
        self._show()

    def exchange(self, own: bytes) -> Sequence[bytes]:
        """Give `own`, and return what all ranks give, in their order. Every rank calls it as often as the others.

        Raises ConfigError or ModelError if that is why a rank cannot start, and RankFailed if one has ended or is
        stopped.
        """
        self._given[0] = own
        with waiting_for_ranks():
            self._wait_for_all()
        contents = tuple(self._given[rank] for rank in range(self.size))
        self._given.clear()
        for channel in self._channels:
            channel.send(Gathered(contents))
        return contents

    def _wait_for_all(self) -> None:
        """Wait for what all ranks give in this exchange. Their progress counts as progress of this rank."""
        steps, until = self._watch.steps(), time.monotonic() + START_SECONDS
        while len(self._given) < self.size:
            self._take(LOOK_SECONDS)
            self._watch.check()
            before, steps = steps, self._watch.steps()
            if steps != before:
                progressed()
                until = time.monotonic() + START_SECONDS
            if time.monotonic() > until:
                late = next(rank for rank in range(self.size) if rank not in self._given)
                text = self.board.read_text(late)
                raise RankFailed(late, f"rank {late} has made no progress for {START_SECONDS:g} s: {text}")

    def serve(self) -> None:
        """Wait until all ranks are ready to apply plans."""
        self.exchange(READY)
        self._serving = True

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """End all ranks if this context fails. The failure of a rank is replaced by the reason that it has given."""
        try:
            yield
        except RankFailed as error:
            reason = self._reason(error)
            self._close_after(reason)
            raise reason from error
        except BaseException as error:
            self._close_after(error)
            raise

    def _close_after(self, reason: BaseException) -> None:
        """End all ranks. If that hangs, the watchdog of the start ends this process, and gives this reason as well."""
        progressed(f"the start failed: {reason}")
        self.close()

    def watched(
        self, overdue: Callable[[], float], stopped_limit: float, hung_limit: float, log: Log
    ) -> AbstractContextManager[None]:
        """Return a context in which the node ends if a rank ends, is stopped or hangs; see RankWatch."""
        return rank_watchdog(RankWatch(self.processes, self.board, overdue, stopped_limit, hung_limit), log)

    def send_plan(self, frame: bytes) -> None:
        """Send a plan to all other ranks. Raises RankFailed if the ring of plans stays full."""
        self.plans.send(frame, PLAN_SECONDS)
        self._sent += 1

    def saves_ended(self) -> int:
        """Return how many saves have ended on all ranks but this one, counted in the order of the plans."""
        return min(self.board.read(rank, BoardField.SAVED) for rank in range(1, self.size))

    def totals(self) -> Sequence[RankTotals]:
        """Return how far each rank is, in their order."""
        own = RankTotals(plans=self._sent, collective_wait_seconds=round(self.group.waited, 6))
        return own, *map(self._totals_of, range(1, self.size))

    def _totals_of(self, rank: int) -> RankTotals:
        applied = self.board.read(rank, BoardField.APPLIED)
        return RankTotals(
            plans=applied,
            behind=max(self._sent - applied, 0),
            collective_wait_seconds=self.board.read(rank, BoardField.WAITED_US) / 1e6,
        )

    def close(self) -> None:
        """End all ranks: in order if all of them serve, else at once."""
        serving = self._serving and all(process.poll() is None for process in self.processes)
        with contextlib.suppress(RankFailed):
            if serving:
                self.plans.send(b"", END_SECONDS)
        self._started.end(END_SECONDS if serving else 0.0)
        self._started.close()
        self._collectives.close()

    def _reason(self, error: RankFailed) -> TandemError:
        """Return why a rank failed: what it has reported, or else the error that another rank noticed.

        A rank that says why has done so before it ends, and thus before other ranks end because of it, whose ends may
        be read first. So once one has ended, only what has arrived by then is read.
        """
        until = time.monotonic() + END_SECONDS
        ended: set[int] = set()
        received = False
        while (received or not ended) and time.monotonic() < until:
            try:
                received = self._take(0.0 if ended else 0.1, ended)
            except RankFailed as failed:
                ended.add(failed.rank)
                received = True
            except TandemError as reason:
                return reason
        return error

    def _take(self, timeout: float, without: Collection[int] = ()) -> bool:
        """Process messages of ranks, but not of those in `without`. Return whether there was one."""
        channels = [each for rank, each in enumerate(self._channels, start=1) if rank not in without]
        ready, _, _ = select.select(channels, [], [], timeout)
        for channel in ready:
            rank = 1 + self._channels.index(channel)
            # The message has begun to arrive.
            message = channel.receive(SEND_SECONDS)
            if isinstance(message, Loading):
                self._loading[rank] = message.done, message.total
                self._show()
            elif isinstance(message, StartFailed):
                raise _error(rank, message)
            else:
                self._given[rank] = message.content
        return bool(ready)

    def _show(self) -> None:
        done, totals = sum(each[0] for each in self._loading), [each[1] for each in self._loading]
        self._report("loading", done, self.size * max(totals))


def _error(rank: int, failed: StartFailed) -> TandemError:
    if failed.kind == "config":
        return ConfigError(failed.path, f"rank {rank}: {failed.problem}")
    if failed.kind == "model":
        return ModelError(f"rank {rank}: {failed.problem}")
    if failed.kind == "hang":
        return RankFailed(rank, f"rank {rank}: {failed.problem}")
    return InternalError(f"rank {rank} cannot start: {failed.problem}")
