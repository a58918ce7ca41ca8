"""The frame of a rank's process: start-up together with rank 0, the main loop, exit codes.

A rank is a child of rank 0, which has read the cluster file; it gets all that it needs as data. It ends when rank 0
tells it to, and when rank 0 has ended for whatever reason. It leaves signals from a terminal to rank 0.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from common.descriptors import prepare_descriptors
from common.engine.collectives.group import CollectiveGroup
from common.engine.collectives.group_ranks import GroupRanks
from common.engine.collectives.shared_memory_group import SharedMemoryGroup
from common.engine.layers.ranks import DivideExperts
from common.engine.ops.triton_kernel import report_compilations
from common.errors import ConfigError, ModelError, RankFailed
from common.ipc.ring import Ring, RingReader, RingWriter
from common.node.late_compilations import report_late_compilations
from common.node.ranks.board import Board, BoardField
from common.node.ranks.device_group import PeerRuntime, RankCollectives
from common.node.ranks.loop import Beat, RankLoop
from common.node.ranks.messages import Begin, Gathered, Given, Loading, StartFailed, ToRank
from common.node.ranks.service import RankService, RankWork
from common.node.ranks.start_channel import StartChannel
from common.observability import logs
from common.observability.failed_threads import end_with_failed_threads
from common.observability.logs import Log
from common.observability.start_progress import StartProgress, progressed, waiting_for_ranks
from common.observability.start_watchdog import start_watchdog
from common.observability.startup import Phase

# The slowest rank may read its files much later than the first, from a slow disk.
START_SECONDS = 3600.0
READY = b"ready"  # the content of the last exchange
REPORTS = 50  # of a rank that loads a model; while rank 0 is busy with its own files, the channel holds few messages


@dataclass(frozen=True, slots=True)
class BuiltRank:
    """The parts that a role composes in the process of a rank."""

    work: RankWork
    service: RankService
    spin_seconds: float = 0.0


class Member:
    """The place of this process among the ranks of its node."""

    def __init__(self, channel: StartChannel[ToRank], begin: Begin) -> None:
        # Passed descriptors are inheritable, and a compiler that this process starts may outlive it.
        for descriptor in begin.descriptors:
            os.set_inheritable(descriptor, False)
        self._channel = channel
        self._reported = -1  # its latest report, from 0 to REPORTS
        self._progress = StartProgress()
        self._shown = 0
        self.begin = begin
        self.board = Board(begin.board)
        self._collectives = RankCollectives(SharedMemoryGroup(begin.collectives))
        rings = begin.rings
        reader = begin.rank - 1
        self.plans = RingReader(Ring(rings.plans), reader, "the plans", 0)
        self.commands = RingReader(Ring(rings.commands), reader, "the commands", 0)
        self.events = RingWriter(Ring(rings.events), "the events", [0])

    @property
    def group(self) -> CollectiveGroup:
        """Combines tensors of all ranks; on GPUs only after `connect`."""
        return self._collectives.group

    def ranks(self, divide_experts: DivideExperts) -> GroupRanks:
        return GroupRanks(self.group, divide_experts)

    def connect(self, device: torch.device, runtime: Callable[[], PeerRuntime], log: Log) -> None:
        """Connect this rank's device with those of the others. See `RankCollectives.connect`."""
        self._collectives.connect(device, runtime, self.exchange, log)

    def close(self) -> None:
        """Leave the group."""
        self._collectives.close()

    def exchange(self, own: bytes) -> Sequence[bytes]:
        """Give `own`, and return what all ranks give, in their order. Every rank calls it as often as the others."""
        self._channel.send(Given(own))
        with waiting_for_ranks():
            gathered = self._channel.receive(START_SECONDS)
        assert isinstance(gathered, Gathered), "rank 0 answers in an exchange"
        return gathered.contents

    def report(self, phase: Phase, done: int = 0, total: int = 0) -> None:
        """Tell rank 0 how much of the model has been loaded; the other phases are the same on all ranks."""
        self._progress.enter(phase, done, total)
        reached = done * REPORTS // max(total, 1)
        if phase == "loading" and reached != self._reported:
            self._reported = reached
            self._channel.send(Loading(done, total))

    def starting(self, log: Log) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this process tells rank 0 its progress, and ends if there is none for too long."""
        limit = self.begin.start_hang_timeout
        return start_watchdog(self._progress, limit, log, self._tell_hang, self._show)

    def _tell_hang(self, problem: str) -> None:
        with contextlib.suppress(RankFailed):
            self._channel.send(StartFailed("hang", "", problem))

    def _show(self) -> None:
        self._shown += 1
        self.board.write_text(self.begin.rank, str(self._progress))
        self.board.write(self.begin.rank, BoardField.STEPS, self._shown)

    def parent_ended(self) -> bool:
        """Return whether rank 0 has ended: it sends nothing after the start."""
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        return bool(poller.poll(0))

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable once rank 0 has ended."""
        return self._channel.fileno()


def run_rank(build: Callable[[Member, Log], BuiltRank], descriptor: int) -> None:
    """Run the whole life of a rank, which rank 0 started with one end of a socket pair as `descriptor`; exit."""
    # Rank 0 ends this process when it has drained.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    prepare_descriptors()
    channel: StartChannel[ToRank] = StartChannel(socket.socket(fileno=descriptor), ToRank, peer=0)
    try:
        begin = channel.receive(START_SECONDS)
    except RankFailed:  # rank 0 cannot start, and says why
        sys.exit(1)
    assert isinstance(begin, Begin), "rank 0 tells a rank first what it is"
    name = f"{begin.node}/{begin.rank}"
    logs.configure(name, begin.log_level)
    log = Log(name)
    try:
        _serve(build, Member(channel, begin), log)
    except RankFailed as error:
        log.error("a rank of this node has failed: this one ends, too", reason=str(error), rank=error.rank)
        sys.exit(1)
    except Exception as error:
        with contextlib.suppress(RankFailed):
            channel.send(_failure(error))
        log.error("this rank ends", reason=str(error))
        if not isinstance(error, (ConfigError, ModelError)):
            raise
        sys.exit(2)


def _serve(build: Callable[[Member, Log], BuiltRank], member: Member, log: Log) -> None:
    beat = Beat(member.board, member.begin.rank, lambda: member.group.waited)
    beat.start()
    report_compilations(lambda kernel, seconds: progressed(f"compiled {kernel.partition('[')[0]}"))
    with member.starting(log), end_with_failed_threads(log):
        built = build(member, log)
        gc.collect()
        gc.freeze()
        member.exchange(READY)
    report_late_compilations(log)  # not announced: rank 0 compiles the same kernels, and announces it for all
    loop = RankLoop(
        member.plans,
        built.work,
        built.service,
        (member.commands.fileno(), member.descriptor),
        member.parent_ended,
        partial(member.board.write, member.begin.rank),
        built.spin_seconds,
    )
    try:
        with end_with_failed_threads(log):
            loop.run()
    finally:
        gc.unfreeze()
        built.service.close()
        member.close()
        beat.stop()


def _failure(error: Exception) -> StartFailed:
    if isinstance(error, ConfigError):
        return StartFailed("config", error.path, str(error).removeprefix(f"{error.path}: "))
    if isinstance(error, ModelError):
        return StartFailed("model", "", str(error))
    return StartFailed("defect", "", f"{type(error).__name__}: {error}")
