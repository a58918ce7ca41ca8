"""The halves of a movable node take turns on its device, and say so when that takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from common.config import load_cluster
from common.node.announced_work import AnnouncedWork, Work
from common.node.shared_device import LOOK_SECONDS, SharedDevice
from common.observability.logs import Log
from deploy import cli
from deploy.movable_node import build as movable
from tests.fakes.clock import Clock
from tests.fakes.waiting import PATIENCE, until


class Half:
    """What one half has announced, and from which threads."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.threads: set[int] = set()

    def announce(self, seconds: float) -> None:
        self.threads.add(threading.get_ident())
        self.seconds.append(seconds)


@pytest.fixture
def waiting() -> Half:
    return Half()


def launches(device: SharedDevice, half: Half, begun: threading.Event) -> int:
    """Launch as the main loop of a half; return the thread."""
    device.use_from_here(half.announce)
    begun.set()
    with device:
        return threading.get_ident()


def test_a_half_that_waits_for_the_device_announces_the_work_of_the_other_one(waiting: Half) -> None:
    clock, own, begun = Clock(), Half(), threading.Event()
    device = SharedDevice(clock)
    device.use_from_here(own.announce)
    with ThreadPoolExecutor(1) as pool:
        with device:
            other = pool.submit(launches, device, waiting, begun)
            assert begun.wait(PATIENCE)
            device.announce(60.0)
            until(lambda: waiting.seconds)
            clock.now += 50.0
            device.announce(60.0)
            until(lambda: len(waiting.seconds) > 1)
        thread = other.result(PATIENCE)
    assert waiting.seconds == own.seconds == [60.0, 60.0]
    assert waiting.threads == {thread}, "its sockets belong to that thread"
    assert own.threads == {threading.get_ident()}


def test_what_was_announced_ends_with_the_turn(waiting: Half) -> None:
    device, begun = SharedDevice(Clock()), threading.Event()
    with device:
        device.announce(60.0)
    with ThreadPoolExecutor(1) as pool:
        with device:
            other = pool.submit(launches, device, waiting, begun)
            assert begun.wait(PATIENCE)
            time.sleep(3 * LOOK_SECONDS)
        other.result(PATIENCE)
    assert waiting.seconds == []


def announced_work(device: SharedDevice, half: Half, clock: Clock) -> AnnouncedWork[int]:
    """Return what announces the launches of this thread's half: plans are numbers of tokens, 8 of which take 1 s."""
    device.use_from_here(half.announce)
    return AnnouncedWork(half.announce, lambda tokens: Work.of(tokens, 0), clock, device)


def test_a_half_announces_the_long_launch_of_the_other_one_with_its_own(waiting: Half) -> None:
    """On a GPU its step runs after that launch, whose thread no longer holds the device."""
    clock, long = Clock(), Half()
    device = SharedDevice(clock)
    prompts = announced_work(device, long, clock)
    with ThreadPoolExecutor(1) as pool:
        tokens = pool.submit(announced_work, device, waiting, clock).result(PATIENCE)
        prompts.begin(800)
        clock.now += 1.0
        pool.submit(tokens.begin, 8).result(PATIENCE)
        assert (long.seconds, waiting.seconds) == ([160.0], [159.0 + 61.0])
        clock.now += 2.0
        pool.submit(tokens.wait).result(PATIENCE)
        assert waiting.seconds[1:] == [157.0 + 61.0]
        prompts.end()
        pool.submit(tokens.wait).result(PATIENCE)
        assert waiting.seconds[2:] == [61.0]
    assert long.seconds == [160.0, 0.0], "it does not wait for the other half"


def test_a_half_that_waits_for_the_device_announces_the_long_launch_of_the_other_one(waiting: Half) -> None:
    """On a CPU the other thread holds the device until its forward has ended."""
    clock, long, begun = Clock(), Half(), threading.Event()
    device = SharedDevice(clock)
    prompts = announced_work(device, long, clock)

    def step() -> None:
        tokens = announced_work(device, waiting, clock)
        tokens.begin(8)
        begun.set()
        with device:
            pass

    with ThreadPoolExecutor(1) as pool:
        with device:
            other = pool.submit(step)
            assert begun.wait(PATIENCE)
            prompts.begin(800)
            until(lambda: len(waiting.seconds) > 1)
        other.result(PATIENCE)
    assert waiting.seconds == [61.0, 160.0 + 61.0]


class CountedLock:
    """The lock of the device, and how often a thread has waited for it without getting it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.missed = 0

    def acquire(self, timeout: float) -> bool:
        got = self._lock.acquire(timeout=timeout)
        self.missed += not got
        return got

    def release(self) -> None:
        self._lock.release()


def test_a_long_launch_that_is_late_takes_nothing_from_what_the_other_half_has_announced(
    waiting: Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own launch still takes what it has announced, after however long a wait."""
    clock, long, lock = Clock(), Half(), CountedLock()
    monkeypatch.setattr("common.node.shared_device.threading.Lock", lambda: lock)
    device = SharedDevice(clock)
    monkeypatch.undo()
    prompts = announced_work(device, long, clock)

    def step() -> None:
        tokens = announced_work(device, waiting, clock)
        tokens.begin(8)
        with device:
            pass

    with ThreadPoolExecutor(1) as pool:
        with device:
            prompts.begin(800)
            clock.now += 200.0
            other = pool.submit(step)
            until(lambda: lock.missed > 1)
        other.result(PATIENCE)
    assert waiting.seconds == [61.0]


def test_threads_that_are_no_main_loop_announce_nothing() -> None:
    device = SharedDevice()
    with device:
        device.announce(60.0)
    with device:
        pass


def test_a_late_kernel_is_announced_by_the_half_whose_thread_compiles_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To its peers, too, which would give its transfers up: only that thread may use their sockets."""
    prompts, tokens, hooks = Half(), Half(), list[Callable[[float], None]]()

    def build(half: Half, seconds: float) -> Callable[..., Any]:
        """Return what builds `half`, whose main loop only compiles, for `seconds`."""

        def made(resolved: object, name: str, reporter: object, log: Log, parts: Any) -> Any:
            parts.loaded(SimpleNamespace(placement=SimpleNamespace(device=SimpleNamespace(type="cpu"))))
            node = SimpleNamespace(announce=half.announce, life=SimpleNamespace(incarnation="d"))
            return SimpleNamespace(
                node=node,
                routers=SimpleNamespace(announce=lambda seconds: None),
                run=lambda: hooks[0](seconds),
                drain=lambda: None,
            )

        return made

    monkeypatch.setattr("prefill_node.build.build", build(prompts, 7.0))
    monkeypatch.setattr("decode_node.build.build", build(tokens, 9.0))
    monkeypatch.setattr(movable, "report_late_compilations", lambda log, announce: hooks.append(announce))
    resolved = load_cluster(cli.DEFAULT.with_name("movable.yaml"))
    name = resolved.cluster.movable.nodes[0].name
    node = movable.build(resolved, name, SimpleNamespace(), Log(name))  # type: ignore[arg-type]
    node.run()
    assert (prompts.seconds, tokens.seconds) == ([7.0], [9.0])
    assert tokens.threads == {threading.get_ident()}
    assert not prompts.threads & tokens.threads
