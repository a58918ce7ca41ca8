"""Publishes the KV events of a node: a PUB socket, and a ROUTER socket that repeats what a subscriber has missed.

The node's main loop only notes what its caches take and give up (`CacheTap`), in a queue with bounds. A thread of its
own turns that into events, a batch per turn, with sequence numbers from 0. What finds no room in the queue is dropped
and counted, and the sequence skips a number, so that subscribers notice.

A defect in that thread is logged and counted. It then goes on after a pause: the sequence skips a number, everything
that was told is cleared, and only what the caches take from then on is told.

The replay socket is asked with ["", number of 8 bytes] and repeats all batches from that number on, as far as it still
has them, then an empty one with the number -1. SNAPSHOT as the number asks for the present state, which is sent as one
batch with the number of the latest one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import zmq

from common.errors import ConfigError
from common.ipc.binding import bind, bind_problem
from common.kv_cache.page_space import contents_of
from common.kv_cache.radix_cache import NO_OBSERVER, CacheObserver, Keys
from common.kv_events.plan import KvEventsPlan
from common.kv_events.published_blocks import Adopted, CacheChange, Evicted, PublishedBlocks
from common.kv_events.wire import (
    END,
    SEQUENCE_BYTES,
    SNAPSHOT,
    AllBlocksCleared,
    Batch,
    Event,
    encode,
    sequence_of,
)
from common.observability.logs import Log

CHANGES_PER_BATCH = 64
BATCH_BYTES = 2 << 20  # of tokens, after which a batch takes no further change
QUEUED_BYTES = 64 << 20  # of tokens that wait for the thread
REPLAY_BYTES = 64 << 20  # of batches that can be repeated
IDLE_SECONDS = 0.02  # after which a thread without changes looks for questions
# Seconds that the thread pauses after a defect; the pause doubles, and starts again after CALM_SECONDS without one.
MIN_PAUSE, MAX_PAUSE, CALM_SECONDS = 0.1, 30.0, 60.0
MAX_PROBLEM = 500  # characters of the reason that routers are told
END_SECONDS = 5.0  # that `close` waits for the thread
MAX_QUESTION_BYTES = 1024
MAX_TOKEN = 1 << 31  # keys from here on belong to images


class KvEvents(Protocol):
    """Tells others what the caches of a node hold; `NO_KV_EVENTS` tells nobody."""

    @property
    def dropped(self) -> int:
        """Number of changes that were not published because the queue was full."""
        ...

    @property
    def failures(self) -> int:
        """Number of defects after which publishing began again."""
        ...

    @property
    def problem(self) -> str:
        """Return why nothing is published now; "" while the publisher is well."""
        ...

    def tap(self, medium: str, page_tokens: int, lookahead: int) -> CacheObserver:
        """Return the observer of one cache. `lookahead`: see keys_with_lookahead."""
        ...

    def start(self) -> None: ...
    def close(self) -> None: ...


class NoKvEvents:
    """A node that publishes nothing."""

    dropped = failures = 0
    problem = ""

    def tap(self, medium: str, page_tokens: int, lookahead: int) -> CacheObserver:
        return NO_OBSERVER

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


NO_KV_EVENTS = NoKvEvents()


class _Published(NamedTuple):
    """A batch that may be sent to many; ZMQ sends a frame without a copy for each of them."""

    sequence: int
    payload: zmq.Frame

    @classmethod
    def of(cls, sequence: int, events: Sequence[Event]) -> _Published:
        return cls(sequence, zmq.Frame(encode(Batch(time.time(), events, 0), _yield), copy=True))


@dataclass(frozen=True, slots=True)
class CacheTap:
    """Notes what one cache takes and gives up. Used by the node's main loop."""

    publisher: KvEventPublisher
    medium: str
    page_tokens: int
    lookahead: int

    def adopted(self, keys: Keys, pages: Sequence[int], first: int, salt: bytes) -> None:
        contents = contents_of(keys, self.lookahead)
        images = contents >= MAX_TOKEN
        plain = int(images.argmax()) if images.any() else len(contents)
        tokens = contents.astype("<i4").tobytes()
        self.publisher.note(
            Adopted(self.medium, self.page_tokens, salt, tokens, plain, first, tuple(pages)), len(tokens)
        )

    def evicted(self, pages: Sequence[int]) -> None:
        self.publisher.note(Evicted(self.medium, tuple(pages)), 0)


class KvEventPublisher:
    """The publisher of one incarnation of a node."""

    def __init__(self, plan: KvEventsPlan, log: Log) -> None:
        self._plan = plan
        self._log = log
        self._topic = plan.topic.encode()
        self._queue = queue.Queue[tuple[CacheChange, int]](plan.max_queue)
        # Each is written by one thread only.
        self._noted_bytes = self._taken_bytes = 0
        self.dropped = 0
        self.failures = 0
        self.problem = ""
        self._logged = ""  # the latest problem that was logged
        self._failed_at, self._pause = -CALM_SECONDS, MIN_PAUSE
        self._seen_drops = 0
        self._blocks = self._no_blocks()
        self._first: list[Event] = []  # of the next batch
        self._sequence = 0  # of the next batch
        self._kept: deque[_Published] = deque(maxlen=plan.replay_batches)
        self._kept_bytes = 0
        self._snapshot: _Published | None = None  # the latest one that was asked for
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._publisher: zmq.Socket[bytes]
        self._questions: zmq.Socket[bytes]

    def tap(self, medium: str, page_tokens: int, lookahead: int) -> CacheObserver:
        return CacheTap(self, medium, page_tokens, lookahead)

    def note(self, change: CacheChange, nbytes: int) -> None:
        """Queue a change, or drop it if the queue is full. Called by the main loop; it never waits."""
        if self._noted_bytes - self._taken_bytes + nbytes > QUEUED_BYTES:
            self.dropped += 1
            return
        try:
            self._queue.put_nowait((change, nbytes))
        except queue.Full:
            self.dropped += 1
        else:
            self._noted_bytes += nbytes

    def start(self) -> None:
        """Bind both sockets and start the thread. Raises ConfigError."""
        self._context = zmq.Context()
        self._publisher = self._bound(zmq.PUB, self._plan.address, "kv_events.first_port")
        self._questions = self._bound(zmq.ROUTER, self._plan.replay_address, "kv_events.first_replay_port")
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the sockets. What is queued is not published: the node's caches are gone."""
        if self._context is None:
            return
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            return  # no other thread may close its sockets; they end with the process
        self._context.destroy(linger=0)
        self._context = None

    def _bound(self, kind: int, address: str, key: str) -> zmq.Socket[bytes]:
        assert self._context is not None
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
        socket.setsockopt(zmq.SNDHWM, 2 * self._plan.replay_batches + 2)
        try:
            bind(socket, address)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                key,
                f"cannot bind to {address}: {bind_problem(error)}; choose another port, or an address of this host",
            ) from error
        return socket

    def _no_blocks(self) -> PublishedBlocks:
        return PublishedBlocks(self._plan.block_tokens, self._plan.token_ids, _yield)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                if self._questions.poll(0):
                    self._answer()
            except Exception as error:
                self._failed(error, "a question for KV events was not answered")
            try:
                self._publish()
            except Exception as error:
                # Which of the changes were told is not known, nor whether the blocks are right.
                self._blocks, self._first, self._snapshot = self._no_blocks(), [AllBlocksCleared()], None
                self._sequence += 1
                self._failed(error, "KV events were not published; publishing begins again")

    def _failed(self, error: Exception, event: str) -> None:
        """Count and log a defect, each kind once, and pause."""
        now = time.monotonic()
        calm = now - self._failed_at >= CALM_SECONDS
        self._pause = MIN_PAUSE if calm else min(2 * self._pause, MAX_PAUSE)
        self._failed_at = now
        self.failures += 1
        self.problem = f"{type(error).__name__}: {error}"[:MAX_PROBLEM]
        if self._logged != (logged := f"{event}: {type(error).__name__}"):
            self._logged = logged
            self._log.exception(event, reason=self.problem)
        self._closing.wait(self._pause)

    def _publish(self) -> None:
        """Publish a batch of what is queued, for which the thread waits up to IDLE_SECONDS."""
        wait = 0.0 if self._first else IDLE_SECONDS
        events = [event for change in self._taken(wait) for event in self._blocks.apply(change)]
        if self.dropped != self._seen_drops:
            # Nobody can be told what is missing: the skipped number says that something is.
            self._seen_drops = self.dropped
            self._sequence += 1
        if not (self._first or events):
            return
        batch = _Published.of(self._sequence, [*self._first, *events])
        self._sequence += 1
        if len(self._kept) == self._kept.maxlen:
            self._kept_bytes -= len(self._kept[0].payload)
        self._kept.append(batch)
        self._kept_bytes += len(batch.payload)
        while self._kept_bytes > REPLAY_BYTES and len(self._kept) > 1:
            self._kept_bytes -= len(self._kept.popleft().payload)
        self._publisher.send_multipart((self._topic, _number(batch.sequence), batch.payload))
        self._first, self.problem = [], ""

    def _taken(self, wait: float) -> Iterator[CacheChange]:
        """Yield what is queued, up to the limits of a batch. Waits up to `wait` seconds for the first change."""
        until = self._taken_bytes + BATCH_BYTES
        with contextlib.suppress(queue.Empty):
            for count in range(CHANGES_PER_BATCH):
                if self._taken_bytes > until:
                    return
                if count:
                    change, nbytes = self._queue.get_nowait()
                else:
                    change, nbytes = self._queue.get(timeout=wait) if wait else self._queue.get_nowait()
                self._taken_bytes += nbytes
                yield change

    def _answer(self) -> None:
        """Answer one question of the replay socket; what is not a question is ignored."""
        frames = self._questions.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            return
        client, start = frames[0], sequence_of(frames[2])
        if start == SNAPSHOT:
            if self._sequence:
                latest = self._sequence - 1
                if self._snapshot is None or self._snapshot.sequence != latest:
                    self._snapshot = _Published.of(latest, self._blocks.snapshot())
                self._reply(client, self._topic, _number(latest), self._snapshot.payload)
        else:
            for batch in self._kept:
                if batch.sequence >= start:
                    self._reply(client, self._topic, _number(batch.sequence), batch.payload)
        self._reply(client, b"", END, b"")
        if not self._first:
            self.problem = ""

    def _reply(self, client: bytes, *frames: bytes | zmq.Frame) -> None:
        # A client that has gone, or does not read, loses messages; the thread does not wait for it.
        self._questions.send_multipart((client, b"", *frames), zmq.NOBLOCK)


def _yield() -> None:
    """Let the node's main loop run, which would otherwise wait for up to 5 ms until this thread is interrupted."""
    time.sleep(0)


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def kv_events_of(plan: KvEventsPlan | None, log: Log) -> KvEvents:
    """Return a node's publisher; without a plan it publishes nothing."""
    return NO_KV_EVENTS if plan is None else KvEventPublisher(plan, log)
