"""The process that fetches images is confined and concurrent, and its death costs only what it was fetching."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Never

import pytest

from common.errors import InvalidRequest, Overloaded
from router.images import fetch_process
from router.images.fetch_process import FetchProcess, FetchSettings, Wanted
from router.process.child_process import framed
from router.process.spawner import Spawner
from tests.fakes.waiting import PATIENCE, eventually

PLAYED = """
import asyncio, os, resource, threading
from common.errors import InvalidRequest
from router.images import fetch_process

class Played:
    def __init__(self, *settings):
        self.settings = settings

    async def fetch(self, address):
        what = address.rpartition("/")[2]
        if what == "never":
            await asyncio.sleep(3600)
        if what == "die":
            os._exit(3)
        if what in ("die_once", "die_once_meanwhile"):
            mark = address.removeprefix("https://images.example").rpartition("/")[0]
            if os.path.exists(mark):
                return b"the second time"
            if what == "die_once_meanwhile":
                await asyncio.sleep(3600)
            os.mkdir(mark)
            os._exit(3)
        if what == "refused":
            raise InvalidRequest("the image cannot be fetched: its host answered 404")
        if what == "garbled":
            # A frame of a `Fetched` whose text is not UTF-8.
            os.write(0, bytes((6, 0, 0, 0, 0x93, 1, 0xC4, 0, 0xA1, 0xFF)))
            await asyncio.sleep(3600)
        if what == "lookup":
            return repr(await asyncio.to_thread(together.wait, 30) >= 0).encode()
        if what == "defect":
            raise KeyError("a defect")
        if what == "large":
            return bytes(fetch_process.HEAD + self.settings[1] + 1)
        if what == "limits":
            kinds = "AS", "FSIZE", "CORE", "NOFILE"
            return repr([resource.getrlimit(getattr(resource, "RLIMIT_" + each))[1] for each in kinds]).encode()
        return repr((self.settings, os.getpgrp() == os.getpid())).encode()

together = threading.Barrier(fetch_process.AT_ONCE)
fetch_process.ImageFetcher = Played
fetch_process.main()
"""
HOST = "https://images.example"


@pytest.fixture
async def played(spawner: Spawner) -> AsyncIterator[FetchProcess]:
    """A real process in which only the remote hosts are faked."""
    made = FetchProcess(spawner, ["images.example"], 300_000, PATIENCE, ("-c", PLAYED))
    yield made
    await made.close()
    await made.close()


async def test_the_rules_are_those_of_the_router_and_the_limits_hold(played: FetchProcess) -> None:
    said = await asyncio.gather(played.fetch(f"{HOST}/"), played.fetch(f"{HOST}/limits"))
    assert said[0].decode() == repr(((("images.example",), 300_000, PATIENCE), True))
    assert said[1].decode() == repr([fetch_process.ADDRESS_SPACE, 0, 0, fetch_process.OPEN_FILES])
    with pytest.raises(InvalidRequest, match="its host answered 404"):
        await played.fetch(f"{HOST}/refused")
    with pytest.raises(RuntimeError, match="KeyError: 'a defect'"):  # a 500, with details in the log
        await played.fetch(f"{HOST}/defect")


async def test_no_lookup_waits_for_others_however_few_cores_there_are(played: FetchProcess) -> None:
    fetches = [played.fetch(f"{HOST}/lookup") for _ in range(fetch_process.AT_ONCE)]
    assert set(await asyncio.gather(*fetches)) == {b"True"}


async def test_the_real_process_applies_every_rule(spawner: Spawner) -> None:
    """A name of the loopback interface, resolved and refused in the process; with no hosts all are refused."""
    real = FetchProcess(spawner, ["localhost"], 1_000, PATIENCE)
    with pytest.raises(InvalidRequest, match=r"cannot be fetched$"):
        await real.fetch("https://localhost/a.png")
    assert real.pid is not None
    await real.close()
    none = FetchProcess(spawner, [], 1_000, PATIENCE)
    with pytest.raises(InvalidRequest, match="this router does not fetch images"):
        await none.fetch("https://localhost/a.png")
    assert none.pid is None
    await none.close()


async def test_a_process_that_dies_twice_floods_or_hangs_costs_only_its_current_fetches(
    played: FetchProcess,
) -> None:
    """Their clients may send the images again."""
    ended, hung = "has ended; try again later$", "does not answer; try again later$"
    for end, said in (("die", ended), ("large", ended), ("garbled", ended), ("hang", hung)):
        assert await played.fetch(f"{HOST}/"), "a new one"
        child = played.pid
        assert child is not None
        others = asyncio.create_task(played.fetch(f"{HOST}/never"))
        await eventually(lambda: played.under_way)
        if end == "hang":
            os.kill(child, signal.SIGSTOP)
            played.seconds = 0.1
        for each in (played.fetch(f"{HOST}/{end}"), others):
            with pytest.raises(Overloaded, match=said):
                await each
        assert played.pid is None


async def test_a_process_that_dies_once_costs_no_image(played: FetchProcess, tmp_path: Path) -> None:
    """Neither the one that it died of, nor another that it was fetching, nor one that comes at that moment."""
    here = f"{HOST}{tmp_path}/mark"
    other = asyncio.create_task(played.fetch(f"{here}/die_once_meanwhile"))
    await eventually(lambda: played.under_way)
    assert await played.fetch(f"{here}/die_once") == b"the second time"
    assert await other == b"the second time"
    child = played.pid
    assert child is not None
    os.kill(child, signal.SIGKILL)
    assert await played.fetch(f"{here}/die_once") == b"the second time"


async def test_how_many_are_on_their_way_is_bounded(
    played: FetchProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetches of disconnected clients are included until they end, so nobody can accumulate them."""
    monkeypatch.setattr(fetch_process, "AT_ONCE", 2)
    for _ in range(2):
        given_up = asyncio.create_task(played.fetch(f"{HOST}/never"))
        before = played.under_way
        await eventually(lambda before=before: played.under_way > before)  # type: ignore[misc]
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
    with pytest.raises(Overloaded, match="2 images are being fetched"):
        await played.fetch(f"{HOST}/")


def test_it_ends_with_the_router_whatever_is_on_its_way() -> None:
    ours, theirs = socket.socketpair()
    with subprocess.Popen([sys.executable, "-c", PLAYED], stdin=theirs.fileno()) as process:
        theirs.close()
        with ours:
            ours.settimeout(PATIENCE)
            ours.sendall(framed(FetchSettings((), 1, 1.0)) + framed(Wanted(1, f"{HOST}/never")))
            assert ours.recv(1), "it is ready"
        assert process.wait(PATIENCE) == 0


async def test_no_process_starts_without_descriptors(
    spawner: Spawner, played: FetchProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next image starts it."""
    await spawner.open()
    with monkeypatch.context() as patched:

        def no_pair() -> Never:
            raise OSError(errno.EMFILE, "too many open files")

        patched.setattr(socket, "socketpair", no_pair)
        with pytest.raises(Overloaded, match="fetches images cannot be started: .*too many open files; try"):
            await played.fetch(f"{HOST}/")
    assert await played.fetch(f"{HOST}/")


async def test_no_process_starts_without_memory_for_a_fork(
    spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the one that starts others can be forked, nor does that one get one of its own."""
    refused = "raise BlockingIOError(11, 'no more processes', sys.executable)"
    program = f"import subprocess, sys\ndef fork(*a, **k): {refused}\nsubprocess.Popen = fork\n"
    full = Spawner(("-c", program + "from router.process.spawn_process import main\nmain()"))
    fetcher = FetchProcess(full, ["images.example"], 1_000, PATIENCE)
    with pytest.raises(Overloaded, match="images cannot be started: no more processes; try again later$"):
        await fetcher.fetch(f"{HOST}/a.png")
    await full.close()

    async def no_fork(*_: object, **__: object) -> Never:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    played = FetchProcess(spawner, ["images.example"], 300_000, PATIENCE, ("-c", PLAYED))
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "create_subprocess_exec", no_fork)
        with pytest.raises(
            Overloaded, match="started: the spawn process cannot be started: no more processes;"
        ):
            await played.fetch(f"{HOST}/")
    assert await played.fetch(f"{HOST}/")
    await played.close()


async def test_a_process_that_does_not_start_is_an_error_of_ours(spawner: Spawner) -> None:
    program = ("-c", "import sys; sys.exit('no memory for threads')")
    with pytest.raises(
        RuntimeError, match="fetch process: .* exit code 1; it printed: no memory for threads"
    ):
        await FetchProcess(spawner, ["images.example"], 1_000, PATIENCE, program).fetch(f"{HOST}/a.png")
