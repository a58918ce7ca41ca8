"""The ranks of a node as rank 0 sees them: starts their processes, exchanges what they have to agree on, ends them."""

from __future__ import annotations

import contextlib
import ctypes
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from common.engine.collectives.endpoints import GroupEndpoint, open_endpoints
from common.engine.collectives.group import CollectiveGroup
from common.engine.collectives.group_ranks import GroupRanks
from common.engine.collectives.shared_memory_group import SharedMemoryGroup
from common.engine.layers.ranks import DivideExperts
from common.errors import ConfigError, InternalError, ModelError, RankFailed, TandemError
from common.ipc.ring import Ring, RingReader, RingWriter
from common.messages.identity import RankTotals
from common.node.ranks.board import Board, Told
from common.node.ranks.device_group import PeerRuntime, RankCollectives
from common.node.ranks.member import READY, START_SECONDS
from common.node.ranks.messages import Begin, FromRank, Gathered, Loading, RankRings, StartFailed
from common.node.ranks.start_channel import StartChannel
from common.node.ranks.watchdog import RankWatch, rank_watchdog
from common.observability.logs import Log
from common.observability.startup import Phase

PLAN_BYTES = 8 << 20  # of the ring of plans; larger frames are split
COMMAND_BYTES = 1 << 20
PLAN_SECONDS = 5.0  # for a rank to make room in a full ring of plans
END_SECONDS = 5.0  # for a rank to end when it is told to
_PR_SET_PDEATHSIG = 1
# Resolved before any fork: between fork and exec hardly anything is safe to call.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def _die_with_parent() -> None:
    """Arrange, between fork and exec, that the child is killed when rank 0 has ended, even if it is stopped."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class RankGroup:
    """Owned by the main thread of rank 0. `start` is called once."""

    def __init__(self, node: str, size: int, report: Callable[[Phase, int, int], None]) -> None:
        """Open what the ranks of a node share. `report` is told their progress together."""
        self._node = node
        self.size = size
        others = size - 1
        self.board = Board.create()
        self._plans = Ring.create(PLAN_BYTES, others)
        self._commands = Ring.create(COMMAND_BYTES, others)
        self._events = [Ring.create(COMMAND_BYTES, 1) for _ in range(others)]
        ranks = range(1, size)
        self.plans = RingWriter(self._plans, "the plans", ranks)
        self.commands = RingWriter(self._commands, "the commands", ranks)
        self.events = [
            RingReader(ring, 0, "the events", rank) for rank, ring in zip(ranks, self._events, strict=True)
        ]
        endpoints = open_endpoints(size)
        self._endpoints: Sequence[GroupEndpoint] = endpoints[1:]
        self._collectives = RankCollectives(SharedMemoryGroup(endpoints[0]))
        self.processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[StartChannel[FromRank]] = []
        self._loading = [(0, 0)] * size  # bytes read and to read, of each rank
        self._given: dict[int, bytes] = {}  # in the exchange that goes on, by rank
        self._report = report
        self._serving = False
        self._sent = 0  # plans

    @property
    def group(self) -> CollectiveGroup:
        """Combines tensors of all ranks; on GPUs only after `connect`."""
        return self._collectives.group

    def ranks(self, divide_experts: DivideExperts) -> GroupRanks:
        return GroupRanks(self.group, divide_experts)

    def connect(self, device: torch.device, runtime: Callable[[], PeerRuntime], log: Log) -> None:
        """Connect this rank's device with those of the others. See `RankCollectives.connect`."""
        self._collectives.connect(device, runtime, self.exchange, log)

    def start(self, module: str, works: Sequence[bytes], log_level: str) -> None:
        """Start ranks 1 and up as `python -m MODULE DESCRIPTOR`; `works` are what their entry module decodes."""
        for rank, work in enumerate(works, start=1):
            endpoint = self._endpoints[rank - 1]
            rings = RankRings(self._plans.spec, self._commands.spec, self._events[rank - 1].spec)
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            channel: StartChannel[FromRank] = StartChannel(near, FromRank, rank)
            self._channels.append(channel)
            begin = Begin(
                node=self._node,
                rank=rank,
                rings=rings,
                board=self.board.descriptor,
                collectives=endpoint,
                log_level=log_level,
                work=work,
            )
            with far:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, str(far.fileno())],
                        stdin=subprocess.DEVNULL,
                        pass_fds=(far.fileno(), *begin.descriptors),
                        preexec_fn=_die_with_parent,
                    )
                )
            # Or this process would keep the sockets of a rank that has ended open.
            endpoint.close()
            channel.send(begin)

    def report(self, phase: Phase, done: int = 0, total: int = 0, message: str = "") -> None:
        """Report the phase of rank 0; loading is that of all ranks."""
        if phase != "loading":
            self._report(phase, done, total)
            return
        self._loading[0] = done, total
        self._take(0.0)
        self._show()

    def exchange(self, own: bytes) -> Sequence[bytes]:
        """Give `own`, and return what all ranks give, in their order. Every rank calls it as often as the others.

        Raises ConfigError or ModelError if that is why a rank cannot start, and RankFailed if it has ended.
        """
        self._given[0] = own
        until = time.monotonic() + START_SECONDS
        while len(self._given) < self.size:
            self._take(1.0)
            if time.monotonic() > until:
                late = next(rank for rank in range(self.size) if rank not in self._given)
                raise RankFailed(late, f"rank {late} did not start within {START_SECONDS:.0f} s")
        contents = tuple(self._given[rank] for rank in range(self.size))
        self._given.clear()
        for channel in self._channels:
            channel.send(Gathered(contents))
        return contents

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
            self.close()
            raise reason from error
        except BaseException:
            self.close()
            raise

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
        return min(self.board.read(rank, Told.SAVED) for rank in range(1, self.size))

    def totals(self) -> Sequence[RankTotals]:
        """Return how far each rank is, in their order."""
        own = RankTotals(plans=self._sent, collective_wait_seconds=round(self.group.waited, 6))
        return own, *map(self._totals_of, range(1, self.size))

    def _totals_of(self, rank: int) -> RankTotals:
        applied = self.board.read(rank, Told.APPLIED)
        return RankTotals(
            plans=applied,
            behind=max(self._sent - applied, 0),
            collective_wait_seconds=self.board.read(rank, Told.WAITED_US) / 1e6,
        )

    def close(self) -> None:
        """End all ranks: in order if all of them serve, else at once."""
        serving = self._serving and all(process.poll() is None for process in self.processes)
        with contextlib.suppress(RankFailed):
            if serving:
                self.plans.send(b"", END_SECONDS)
        until = time.monotonic() + (END_SECONDS if serving else 0.0)
        for process in self.processes:
            try:
                process.wait(max(until - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self.processes:
            # One that hangs in a driver ends when the driver lets it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        for endpoint in self._endpoints[len(self.processes) :]:
            endpoint.close()
        for channel in self._channels:
            channel.close()
        for ring in (self._plans, self._commands, *self._events):
            ring.close()
        self._collectives.close()
        self.board.close()

    def _reason(self, error: RankFailed) -> TandemError:
        """Return why a rank failed: what it has said, or else the error that another rank noticed.

        A rank that says why has done so before it ends, and thus before other ranks end because of it, whose ends may
        be read first. So once one has ended, only what has arrived by then is read.
        """
        until = time.monotonic() + END_SECONDS
        ended: set[int] = set()
        heard = False
        while (heard or not ended) and time.monotonic() < until:
            try:
                heard = self._take(0.0 if ended else 0.1, ended)
            except RankFailed as failed:
                ended.add(failed.rank)
                heard = True
            except TandemError as said:
                return said
        return error

    def _take(self, timeout: float, without: Collection[int] = ()) -> bool:
        """Process messages of ranks, but not of those in `without`. Return whether there was one."""
        channels = [each for rank, each in enumerate(self._channels, start=1) if rank not in without]
        ready, _, _ = select.select(channels, [], [], timeout)
        for channel in ready:
            rank = 1 + self._channels.index(channel)
            message = channel.receive(START_SECONDS)
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


def _error(rank: int, failed: StartFailed) -> ConfigError | ModelError | InternalError:
    if failed.kind == "config":
        return ConfigError(failed.path, f"rank {rank}: {failed.problem}")
    if failed.kind == "model":
        return ModelError(f"rank {rank}: {failed.problem}")
    return InternalError(f"rank {rank} cannot start: {failed.problem}")
