"""The processes of ranks 1 and up, and what they share with rank 0. No torch: they import it while rank 0 does, too."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from common.engine.collectives.endpoints import open_endpoints
from common.ipc.ring import Ring
from common.node.ranks.board import Board
from common.node.ranks.messages import Begin, FromRank, RankRings
from common.node.ranks.start_channel import StartChannel
from common.parent_death import at_parent_death

PLAN_BYTES = 8 << 20  # of the ring of plans; larger frames are split
COMMAND_BYTES = 1 << 20
END_SECONDS = 5.0  # for a rank to end when it is told to


class RankProcesses:
    """Owned by the main thread of rank 0. `start` and `begin` are called once, in this order."""

    def __init__(self, size: int) -> None:
        """Open what the ranks of a node share."""
        self.size = size
        self.board = Board.create()
        self.plans = Ring.create(PLAN_BYTES, size - 1)
        self.commands = Ring.create(COMMAND_BYTES, size - 1)
        self.events = [Ring.create(COMMAND_BYTES, 1) for _ in range(1, size)]
        self.own, *self._endpoints = open_endpoints(size)
        self.channels: list[StartChannel[FromRank]] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, module: str) -> None:
        """Start the processes as `python -m MODULE DESCRIPTOR`. Each imports its module, and waits for `begin`."""
        for rank in range(1, self.size):
            endpoint = self._endpoints[rank - 1]
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            self.channels.append(StartChannel(near, FromRank, rank))
            shared = self._begin(rank, "", b"", "", 0.0)
            with far:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, str(far.fileno())],
                        stdin=subprocess.DEVNULL,
                        pass_fds=(far.fileno(), *shared.descriptors),
                        # SIGKILL also ends a rank that is stopped.
                        preexec_fn=at_parent_death(signal.SIGKILL),
                    )
                )
            # Otherwise this process would keep open the sockets of a rank that has ended.
            endpoint.close()

    def begin(self, node: str, works: Sequence[bytes], log_level: str, hang_timeout: float) -> None:
        """Tell every rank what it is; their entry module decodes `works`. Raises RankFailed if one has ended.

        Args:
            hang_timeout: seconds without progress after which a rank that starts ends; 0: never.
        """
        for rank, work in enumerate(works, start=1):
            self.channels[rank - 1].send(self._begin(rank, node, work, log_level, hang_timeout))

    def _begin(self, rank: int, node: str, work: bytes, log_level: str, hang_timeout: float) -> Begin:
        return Begin(
            node=node,
            rank=rank,
            rings=RankRings(self.plans.spec, self.commands.spec, self.events[rank - 1].spec),
            board=self.board.descriptor,
            collectives=self._endpoints[rank - 1],
            log_level=log_level,
            start_hang_timeout=hang_timeout,
            work=work,
        )

    def end(self, seconds: float) -> None:
        """Wait until the processes have ended, and kill those that have not after `seconds`."""
        until = time.monotonic() + seconds
        for process in self.processes:
            try:
                process.wait(max(until - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self.processes:
            # One that hangs in a driver ends when the driver lets it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)

    def close(self) -> None:
        """Close what the ranks share, but not `own`, which the collectives of rank 0 have taken over."""
        for endpoint in self._endpoints[len(self.processes) :]:
            endpoint.close()
        for channel in self.channels:
            channel.close()
        for ring in (self.plans, self.commands, *self.events):
            ring.close()
        self.board.close()


def start_ranks(module: str, devices: Sequence[str]) -> RankProcesses | None:
    """Start the processes of ranks 1 and up, whose entry module is `module`; None for a node with one device."""
    if len(devices) == 1:
        return None
    started = RankProcesses(len(devices))
    started.start(module)
    return started
