"""The sockets of a node's KV events, as a subscriber sees them."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from common.errors import ConfigError
from common.ipc import host_lookup
from common.kv_cache.image_keys import IMAGE_BIT
from common.kv_cache.page_space import keys_with_lookahead
from common.kv_cache.radix_cache import CacheObserver, RadixCache
from common.kv_events import publisher as publishing
from common.kv_events.plan import KvEventsPlan
from common.kv_events.publisher import NO_KV_EVENTS, KvEventPublisher, kv_events_of
from common.kv_events.wire import (
    END,
    GPU,
    SNAPSHOT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode,
    encode,
)
from common.observability.logs import Log
from tests.fakes.waiting import PATIENCE, until

LOG = Log("prefill-0")
PATIENCE_MS = int(PATIENCE * 1000)
PAGE = 2


def plan_in(directory: Path, **changed: Any) -> KvEventsPlan:
    known: dict[str, Any] = {
        "address": f"ipc://{directory}/pub",
        "replay_address": f"ipc://{directory}/replay",
        "topic": "kv@prefill-0@tiny",
        "block_tokens": 2,
        "token_ids": True,
        "replay_batches": 10_000,
        "max_queue": 1000,
    }
    return KvEventsPlan(**(known | changed))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Subscriber:
    """Sockets that are connected to a publisher."""

    def __init__(self, plan: KvEventsPlan) -> None:
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._events = self._context.socket(zmq.SUB)
        self._events.connect(plan.address)
        self._events.subscribe(b"kv@prefill-0@")
        self._replay = self._context.socket(zmq.DEALER)
        # What is not read waits at the publisher.
        self._replay.setsockopt(zmq.RCVHWM, 1)
        self._replay.connect(plan.replay_address)

    def hears(self, milliseconds: int) -> bool:
        return bool(self._events.poll(milliseconds))

    def next(self) -> list[bytes]:
        assert self.hears(PATIENCE_MS), "no event"
        return self._events.recv_multipart()

    def ask(self, start: int) -> list[list[bytes]]:
        """Return the answers of the replay socket up to and without the last one."""
        self._replay.send_multipart((b"", start.to_bytes(8, "big")))
        answers: list[list[bytes]] = []
        while True:
            assert self._replay.poll(PATIENCE_MS), "no answer"
            empty, *frames = self._replay.recv_multipart()
            assert empty == b""
            if frames == [b"", END, b""]:
                return answers
            answers.append(frames)

    def answered(self) -> bool:
        return bool(self._replay.poll(PATIENCE_MS))

    def send(self, *frames: bytes) -> None:
        self._replay.send_multipart(frames)

    def close(self) -> None:
        self._context.destroy(linger=0)


class Connected:
    """A publisher with a cache, and a subscriber."""

    def __init__(self, plan: KvEventsPlan) -> None:
        self.publisher = KvEventPublisher(plan, LOG)
        self.tap: CacheObserver = self.publisher.tap(GPU, PAGE, 0)
        self.cache = RadixCache(PAGE, observer=self.tap)
        self.publisher.start()
        self.subscriber = Subscriber(plan)
        # A subscription arrives some time after `connect`.
        self._page = 1000
        self.first = self._settle()

    def insert(self, token: int) -> None:
        """Cache a block of its own."""
        self._page += 1
        self.cache.insert(np.array([token, token]), [self._page])

    def _settle(self) -> int:
        """Return the number of the next batch, once the subscriber hears events and has read all of them."""
        token = 10_000
        self.insert(token)
        while not self.subscriber.hears(50):
            token += 1
            self.insert(token)
        while True:
            _, number, payload = self.subscriber.next()
            for event in decode(payload, tokens=True).events:
                if isinstance(event, BlockStored) and event.token_ids == [token, token]:
                    return int.from_bytes(number, "big") + 1

    def close(self) -> None:
        self.subscriber.close()
        self.publisher.close()


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[Connected]:
    made = Connected(plan_in(tmp_path))
    yield made
    made.close()


def test_events_are_published_with_topic_and_number(connected: Connected) -> None:
    for at in range(3):
        connected.insert(at)
        topic, number, payload = connected.subscriber.next()
        assert topic == b"kv@prefill-0@tiny"
        assert int.from_bytes(number, "big") == connected.first + at
        (event,) = decode(payload, tokens=True).events
        assert isinstance(event, BlockStored)
        assert event.token_ids == [at, at]
        assert decode(payload).data_parallel_rank == 0


def test_missed_batches_are_repeated(connected: Connected) -> None:
    heard = []
    for at in range(3):
        connected.insert(at)
        heard.append(connected.subscriber.next())
    assert connected.subscriber.ask(connected.first) == heard
    assert connected.subscriber.ask(connected.first + 1) == heard[1:]
    assert connected.subscriber.ask(connected.first + 3) == []
    assert len(connected.subscriber.ask(0)) == connected.first + 3


def test_a_snapshot_has_everything_under_the_latest_number(connected: Connected) -> None:
    connected.insert(1)
    latest = connected.subscriber.next()
    ((_, number, payload),) = connected.subscriber.ask(SNAPSHOT)
    assert number == latest[1]
    cleared, *stored = decode(payload, tokens=True).events
    assert cleared == AllBlocksCleared()
    hashes = [each for event in stored if isinstance(event, BlockStored) for each in event.block_hashes]
    assert len(hashes) == connected.cache.cached_pages
    (event,) = decode(latest[2]).events
    assert isinstance(event, BlockStored)
    assert set(event.block_hashes) <= set(hashes)


def test_those_who_ask_and_do_not_read_share_what_waits_for_them(tmp_path: Path) -> None:
    """Each of 40 subscribers asks for 4 MiB of batches."""
    plan = plan_in(tmp_path, block_tokens=1000)
    with ExitStack() as stack:
        publisher = stack.enter_context(closing(KvEventPublisher(plan, LOG)))
        subscriber, *asked = [stack.enter_context(closing(Subscriber(plan))) for _ in range(41)]
        cache = RadixCache(1000, observer=publisher.tap(GPU, 1000, 0))
        publisher.start()
        for number in range(8):
            pages = range(100 * number, 100 * number + 100)
            cache.insert(np.full(100_000, 70_000 + number), pages)
            while len(subscriber.ask(0)) <= number:
                pass
        before = resident_bytes()
        for each in asked:
            each.send(b"", bytes(8))
        for each in asked:
            assert each.answered(), "no answer"
        subscriber.ask(0)
        assert (resident_bytes() - before) >> 20 < 80


def test_what_is_no_question_gets_no_answer(connected: Connected) -> None:
    for frames in ((b"",), (b"", b"123"), (b"x", bytes(8)), (b"", bytes(8), b"")):
        connected.subscriber.send(*frames)
    assert connected.subscriber.ask(connected.first) == []


def test_only_the_last_batches_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Connected(plan_in(tmp_path, replay_batches=2))
    try:
        for at in range(4):
            made.insert(at)
            size = len(made.subscriber.next()[2])
            # Batches that are no longer kept do not count.
            monkeypatch.setattr(publishing, "REPLAY_BYTES", 2 * size)
        numbers = [int.from_bytes(each[1], "big") for each in made.subscriber.ask(0)]
        assert numbers == [made.first + 2, made.first + 3]
    finally:
        made.close()


def test_a_full_queue_drops_changes_and_skips_a_number(tmp_path: Path) -> None:
    plan = plan_in(tmp_path, max_queue=64)
    publisher = KvEventPublisher(plan, LOG)
    cache = RadixCache(PAGE, observer=publisher.tap(GPU, PAGE, 0))
    for token in range(70):  # before the thread runs
        cache.insert(np.array([token, token]), [token + 1])
    assert publisher.dropped == 6
    publisher.start()
    subscriber = Subscriber(plan)
    try:
        numbers = [int.from_bytes(each[1], "big") for each in _until_some(subscriber)]
        assert numbers == [1], "number 0 is missing, as some events are"
    finally:
        subscriber.close()
        publisher.close()


def _until_some(subscriber: Subscriber, count: int = 1) -> list[list[bytes]]:
    for _ in range(100):
        answers = subscriber.ask(0)
        if len(answers) >= count:
            return answers
    raise AssertionError("nothing was published")


def test_queued_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.kv_events.publisher.QUEUED_BYTES", 20)
    publisher = KvEventPublisher(plan_in(tmp_path), LOG)
    tap = publisher.tap(GPU, PAGE, 0)
    for page in range(4):
        tap.adopted(np.array([1, 2]), [page], 0, b"")
    assert publisher.dropped == 2
    tap.evicted([1])
    assert publisher.dropped == 2, "evictions take no room"


def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    plan = plan_in(tmp_path, address="tcp://127.0.0.1:1", replay_address=f"ipc://{tmp_path}/replay")
    publisher = KvEventPublisher(plan, LOG)
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        taken = KvEventPublisher(plan_in(tmp_path, address=f"tcp://127.0.0.1:{port}"), LOG)
        with pytest.raises(ConfigError, match=f"cannot bind to tcp://127.0.0.1:{port}") as caught:
            taken.start()
        taken.close()
    assert caught.value.path == "kv_events.first_port"
    publisher.close()


def test_a_name_that_is_not_found_is_said_not_to_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> list[str]:
        raise OSError(f"{name} is unknown")

    monkeypatch.setattr(host_lookup, "resolve", unknown)
    publisher = KvEventPublisher(plan_in(tmp_path, address="tcp://tandem-prefill:5557"), LOG)
    with pytest.raises(
        ConfigError, match="cannot bind to tcp://tandem-prefill:5557: neither a host nor a network"
    ):
        publisher.start()
    publisher.close()


def test_a_node_does_not_wait_for_a_thread_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` gives up after END_SECONDS."""
    begun, released = threading.Event(), threading.Event()

    def encode_for_ever(*arguments: object) -> bytes:
        begun.set()
        released.wait(PATIENCE_MS / 1e3)
        return b""

    monkeypatch.setattr(publishing, "encode", encode_for_ever)
    monkeypatch.setattr(publishing, "END_SECONDS", 0.05)
    publisher = KvEventPublisher(plan_in(tmp_path), LOG)
    publisher.start()
    publisher.tap(GPU, PAGE, 0).adopted(np.arange(2, dtype=np.int64), [1], 0, b"")
    assert begun.wait(PATIENCE_MS / 1e3)
    publisher.close()
    assert not released.is_set()
    assert "kv-events" in {each.name for each in threading.enumerate()}
    released.set()
    monkeypatch.setattr(publishing, "END_SECONDS", PATIENCE_MS / 1e3)
    publisher.close()
    assert "kv-events" not in {each.name for each in threading.enumerate()}


class Defect:
    """Replaces `encode`, and fails as often as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        self.met: list[float] = []  # when
        self._encode = encode
        monkeypatch.setattr(publishing, "encode", self)

    def __call__(self, *arguments: Any) -> bytes:
        if self.left:
            self.left -= 1
            self.met.append(time.monotonic())
            raise RuntimeError("a defect")
        return self._encode(*arguments)


def test_a_defect_is_told_and_publishing_begins_again(
    connected: Connected, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publishing, "MIN_PAUSE", 0.05)
    publisher, subscriber = connected.publisher, connected.subscriber
    defect = Defect(monkeypatch, 2)
    connected.insert(1)
    _, number, payload = subscriber.next()
    assert int.from_bytes(number, "big") > connected.first, "the number of what was lost is skipped"
    assert list(decode(payload).events) == [AllBlocksCleared()]
    until(lambda: not publisher.problem)
    assert (publisher.failures, defect.left) == (2, 0)
    assert caplog.text.count("RuntimeError: a defect") == 1, "each kind of defect once"
    connected.insert(2)
    latest = subscriber.next()
    assert int.from_bytes(latest[1], "big") == int.from_bytes(number, "big") + 1
    ((_, number, payload),) = subscriber.ask(SNAPSHOT)
    assert number == latest[1]
    assert list(decode(payload).events[1:]) == [
        msgspec.structs.replace(event, token_ids=()) for event in decode(latest[2]).events
    ], "nothing that was told before"


def test_a_defect_that_stays_keeps_no_processor_busy(
    connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The third pause is longer than the usual first one.
    monkeypatch.setattr(publishing, "MIN_PAUSE", least := 0.04)
    publisher, defect = connected.publisher, Defect(monkeypatch, 1_000_000)
    connected.insert(1)
    until(lambda: publisher.failures >= 4)
    # The first ones: those of a test that was held up for long reach MAX_PAUSE.
    pauses = [later - earlier for earlier, later in pairwise(defect.met[:4])]
    assert all(pause >= least * 2**at for at, pause in enumerate(pauses)), (
        "each twice as long as the one before"
    )
    assert publisher.problem == "RuntimeError: a defect"
    defect.left = 0
    until(lambda: not publisher.problem)


def test_a_question_that_meets_a_defect_changes_nothing_that_was_told(
    connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "MIN_PAUSE", 0.02)
    Defect(monkeypatch, 1)
    connected.subscriber.send(b"", SNAPSHOT.to_bytes(8, "big"))
    until(lambda: connected.publisher.failures)
    ((_, number, _),) = connected.subscriber.ask(SNAPSHOT)
    assert int.from_bytes(number, "big") == connected.first - 1
    until(lambda: not connected.publisher.problem)
    assert connected.publisher.failures == 1
    assert not connected.subscriber.hears(50)


def test_without_a_plan_nothing_is_published() -> None:
    events = kv_events_of(None, LOG)
    assert events is NO_KV_EVENTS
    events.start()
    events.tap(GPU, PAGE, 0).adopted(np.array([1, 2]), [1], 0, b"")
    events.close()
    assert (events.dropped, events.failures, events.problem) == (0, 0, "")


def test_bytes_that_were_published_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.kv_events.publisher.QUEUED_BYTES", 20)
    made = Connected(plan_in(tmp_path))
    try:
        for at in range(10):
            made.insert(at)
            made.subscriber.next()
        assert made.publisher.dropped == 0
    finally:
        made.close()


def test_a_batch_and_what_can_be_repeated_have_limits_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.kv_events.publisher.BATCH_BYTES", 1)
    plan = plan_in(tmp_path)
    publisher = KvEventPublisher(plan, LOG)
    tap = publisher.tap(GPU, PAGE, 0)
    for page in range(1, 5):  # before the thread runs
        tap.adopted(np.array([page, page]), [page], 0, b"")
    publisher.start()
    subscriber = Subscriber(plan)
    try:
        answers = _until_some(subscriber, 4)
        assert [len(decode(each[2]).events) for each in answers] == [1, 1, 1, 1]
        monkeypatch.setattr("common.kv_events.publisher.REPLAY_BYTES", 3 * len(answers[0][2]))
        tap.adopted(np.array([5, 5]), [5], 0, b"")
        for _ in range(100):
            if len(answers := subscriber.ask(0)) == 3:
                break
        assert [int.from_bytes(each[1], "big") for each in answers] == [2, 3, 4]
    finally:
        subscriber.close()
        publisher.close()


def test_keys_of_pairs_end_before_the_first_image(connected: Connected) -> None:
    """A draft shares the pages, so keys are pairs, and those of an image have no tokens: their pages end no block."""
    tap = connected.publisher.tap(GPU, PAGE, 1)
    keys = keys_with_lookahead(1)(np.array([7, 8, 9, IMAGE_BIT + 7, IMAGE_BIT + 8]))
    tap.adopted(keys, [501, 502], 0, b"")
    (event,) = decode(connected.subscriber.next()[2], tokens=True).events
    assert isinstance(event, BlockStored)
    assert (len(event.block_hashes), event.token_ids) == (1, [7, 8])
    tap.evicted([501, 502])
    (event,) = decode(connected.subscriber.next()[2]).events
    assert isinstance(event, BlockRemoved)
    assert len(event.block_hashes) == 1
    assert connected.publisher.failures == 0


def test_rows_of_images_are_no_token_ids(connected: Connected) -> None:
    connected.cache.insert(np.array([7, IMAGE_BIT + 7]), [5])
    (event,) = decode(connected.subscriber.next()[2], tokens=True).events
    assert isinstance(event, BlockStored)
    assert event.block_hashes
    assert event.token_ids == []
