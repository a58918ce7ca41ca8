"""Collectives of ranks on one host through shared memory; no rank spins while it waits.

A collective takes rounds. In each round a rank writes at most a slot of bytes to its place in the shared memory, sends
one byte to every other rank, and receives one from each, after which it reads the places of all. Odd and even rounds
have places of their own: a rank writes to a place again two rounds later, after all ranks have sent their byte of the
round between, and so have read it.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NoReturn

import torch
from torch import Tensor

from common.engine.collectives.endpoints import HEADER_BYTES, GroupEndpoint
from common.engine.collectives.fake_group import FakeGroup
from common.engine.collectives.group import CollectiveGroup
from common.errors import RankFailed
from common.kv_cache.shard import Shard
from common.observability.start_progress import progressed

# Seconds. Rank 0 may encode images for as long as a node may announce (600 s), while the others wait in the forward's
# first collective. Watchdogs, which know what is announced, notice a rank that hangs long before.
TIMEOUT = 660.0
LOOK_SECONDS = 1.0  # a process that is stopped while it waits counts that as one look
# Which call a rank is in: the number of the round, the collective, the dtype, and the bytes of its whole tensor.
HEADER = struct.Struct("<Q16s16sQ")
CONTINUE = b"\0"  # of a round; any other byte is 1 + the rank that has failed
HALVES = (torch.bfloat16, torch.float16)


class SharedMemoryGroup(CollectiveGroup):
    """A rank's end of a group on one host. One thread calls it at a time.

    Sums are made in the order of the ranks, in float32 for 16-bit floats.

    Args:
        endpoint: is taken over and closed with the group.
        timeout: how many seconds this rank waits for each of the others in a round; may be set again between two calls.
            Only time in which this rank runs itself counts, so that ranks that were stopped together go on together.
    """

    def __init__(self, endpoint: GroupEndpoint, timeout: float = TIMEOUT) -> None:
        super().__init__(Shard(endpoint.rank, endpoint.size))
        self._rank, self._size, self.timeout = endpoint.rank, endpoint.size, timeout
        others = [rank for rank in range(endpoint.size) if rank != endpoint.rank]
        self._peers = {
            rank: socket.socket(fileno=fd) for rank, fd in zip(others, endpoint.peers, strict=True)
        }
        for peer in self._peers.values():
            peer.set_inheritable(False)
            peer.settimeout(LOOK_SECONDS)
        self._slot_bytes, self._stride = endpoint.slot_bytes, HEADER_BYTES + endpoint.slot_bytes
        self._memory = mmap.mmap(endpoint.memory, 2 * endpoint.size * self._stride)
        os.close(endpoint.memory)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._round = 0
        self._fake = FakeGroup(self.shard)
        self._failure: RankFailed | None = None

    @property
    def for_capture(self) -> FakeGroup:
        return self._fake

    def all_reduce(self, x: Tensor) -> Tensor:
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        flat, done = total.view(-1), 0
        for parts in self._exchange("all_reduce", x):
            wide = parts[0].to(torch.float32 if x.dtype in HALVES else x.dtype, copy=True)
            for part in parts[1:]:
                wide += part
            flat[done : done + len(wide)] = wide
            done += len(wide)
        return total

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        found: list[list[Tensor]] = [[] for _ in range(self._size)]
        for parts in self._exchange("all_gather", x):
            for each, part in zip(found, parts, strict=True):
                each.append(part.clone())
        gathered, rows = [torch.cat(each) for each in found], math.prod(x.shape[:-1])
        assert sum(map(len, gathered)) == rows * columns, (
            f"the ranks do not have {columns} columns for {rows} rows"
        )
        parts = [each.view(*x.shape[:-1], len(each) // max(rows, 1)) for each in gathered]
        return torch.cat(parts, dim=-1) if rows else x.new_empty((*x.shape[:-1], columns))

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        given = torch.empty_like(x, memory_format=torch.contiguous_format)
        flat, done = given.view(-1), 0
        for parts in self._exchange("broadcast", x):
            flat[done : done + len(parts[source])] = parts[source]
            done += len(parts[source])
        return given

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def ended(self) -> int | None:
        """Return a rank whose process has ended or that has left, if there is one; never waits.

        Any thread may call it while the group is open.
        """
        poller = select.poll()
        ranks = {peer.fileno(): rank for rank, peer in self._peers.items()}
        for descriptor in ranks:
            poller.register(descriptor, select.POLLRDHUP)
        found = poller.poll(0)
        return ranks[found[0][0]] if found else None

    def close(self) -> None:
        for each in self._peers.values():
            each.close()
        self._failure = self._failure or RankFailed(self._rank, f"rank {self._rank} has left its group")

    def _exchange(self, call: str, x: Tensor) -> Iterator[Sequence[Tensor]]:
        """Yield what all ranks pass, in their order, slot by slot; views of the shared memory until the next round."""
        flat = x.contiguous().view(-1)
        step, done, left = self._slot_bytes // x.itemsize, 0, True
        while left:
            self._write(call, x, flat[done : done + step])
            self._wait_for_all()
            lengths = [self._length(rank, call, x) for rank in range(self._size)]
            yield [
                self._slot(rank).view(x.dtype)[: max(min(length - done, step), 0)]
                for rank, length in enumerate(lengths)
            ]
            done += step
            left = done < max(lengths)
            self._round += 1

    def _at(self, rank: int) -> int:
        return (self._round % 2 * self._size + rank) * self._stride

    def _slot(self, rank: int) -> Tensor:
        begin = self._at(rank) + HEADER_BYTES
        return self._bytes[begin : begin + self._slot_bytes]

    def _write(self, call: str, x: Tensor, part: Tensor) -> None:
        self.check()
        HEADER.pack_into(
            self._memory, self._at(self._rank), self._round, call.encode(), _name(x).encode(), x.nbytes
        )
        self._slot(self._rank).view(x.dtype)[: len(part)] = part

    def _length(self, rank: int, call: str, x: Tensor) -> int:
        """Return the number of values that a rank passes in all, after it was checked that it makes the same call."""
        number, theirs, dtype, nbytes = HEADER.unpack_from(self._memory, self._at(rank))
        ours = self._round, call, _name(x)
        same_length = call == "all_gather" or nbytes == x.nbytes
        if (number, _text(theirs), _text(dtype)) != ours or not same_length:
            self._fail(
                rank,
                f"rank {rank} calls {_text(theirs)} with {nbytes} bytes of {_text(dtype)} in round {number}, while "
                f"rank {self._rank} calls {call} with {x.nbytes} bytes of {_name(x)} in round {self._round}",
            )
        return int(nbytes) // x.itemsize

    def _wait_for_all(self) -> None:
        """Wait until every rank is in this round."""
        self._send(CONTINUE)
        began = time.perf_counter()
        for rank, peer in self._peers.items():
            answer = self._receive(rank, peer)
            if answer != CONTINUE:
                self._fail(answer[0] - 1, f"rank {answer[0] - 1} has failed, as rank {rank} has noticed")
        self.waited += time.perf_counter() - began

    def _receive(self, rank: int, peer: socket.socket) -> bytes:
        """Return the next byte of another rank."""
        answer: bytes | None = None
        for _ in range(math.ceil(self.timeout / LOOK_SECONDS)):
            try:
                answer = peer.recv(1)
                break
            except TimeoutError:
                # A start is not held up here: this wait has a limit of its own.
                progressed()
                continue
            except OSError as error:
                self._fail(rank, f"rank {rank} has ended: {error}")
        if answer is None:
            self._fail(rank, f"rank {rank} has not answered for {self.timeout:g} s")
        if not answer:
            self._fail(rank, f"rank {rank} has ended: its connection is closed")
        return answer

    def _send(self, answer: bytes) -> None:
        for peer in self._peers.values():
            with suppress(OSError):  # what has become of it is found out when it is asked
                peer.send(answer)

    def _fail(self, rank: int, problem: str) -> NoReturn:
        self._send(bytes([rank + 1]))
        self._failure = RankFailed(rank, f"{problem}; the ranks of a node end together, restart the node")
        raise self._failure


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode()
