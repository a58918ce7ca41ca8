"""Processes are started by the spawn process, so the router's event loop never waits for a fork."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import re
import signal
import socket
from typing import Any, Never

import pytest

from router.process import spawner as spawner_module
from router.process.spawn_process import MAX_PRINTED
from router.process.spawner import Child, Spawner
from tests.fakes.waiting import PATIENCE, eventually

ECHO = "import socket; s = socket.socket(fileno=0); s.sendall(s.recv(99))"


async def started(spawner: Spawner, program: str, **options: Any) -> tuple[Child, socket.socket]:
    child, channel = await spawner.start(("-c", program), **options)
    channel.settimeout(PATIENCE)
    return child, channel


async def test_a_process_has_a_channel_and_its_end_is_reported(spawner: Spawner) -> None:
    child, channel = await started(spawner, ECHO)
    with channel:
        assert child.returncode is None
        channel.sendall(b"hello")
        assert await asyncio.to_thread(channel.recv, 99) == b"hello"
        assert await child.wait() == child.returncode == 0
        assert channel.recv(99) == b"", "no other process holds the channel's other end"


async def test_it_prints_into_the_channel_with_the_environment_that_it_is_given(spawner: Spawner) -> None:
    program = "import os; print(os.environ['A'], 'PATH' in os.environ)"
    child, channel = await started(spawner, program, environment={"A": "b"}, answers=True)
    with channel:
        assert await child.wait() == 0
        assert channel.recv(99) == b"b True\n"


async def test_libraries_have_one_thread_in_it_on_a_machine_with_many_cores(spawner: Spawner) -> None:
    """OpenBLAS keeps 40 MiB per thread, so 64 cores would use up the address space that such a process may have."""
    program = (
        "import numpy, os; print(len(os.listdir('/proc/self/task')), os.environ['OPENBLAS_NUM_THREADS'])"
    )
    child, channel = await started(spawner, program, answers=True)
    with channel:
        assert await child.wait() == 0
        assert channel.recv(99) == b"1 1\n"


async def test_the_event_loop_starts_nothing_itself(
    spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    await spawner.open()

    async def refuse(*_: object, **__: object) -> Never:
        raise AssertionError("a process is started on the event loop")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    for _ in range(3):
        child, channel = await started(spawner, "pass")
        channel.close()
        assert await child.wait() == 0


async def test_a_signal_shows_in_the_code(spawner: Spawner) -> None:
    child, channel = await started(spawner, "import time; time.sleep(3600)")
    with channel:
        child.kill()
        assert await child.wait() == -signal.SIGKILL
        child.kill()


async def test_a_program_that_cannot_run_is_an_error(spawner: Spawner) -> None:
    with pytest.raises(OSError, match="embedded null"):
        await started(spawner, "x", environment={"A": "\0"})
    child, channel = await started(spawner, "pass")
    channel.close()
    assert await child.wait() == 0


async def test_the_death_of_the_process_that_starts_others_ends_nothing_else(spawner: Spawner) -> None:
    child, channel = await started(spawner, ECHO)
    with channel:
        first = spawner.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        # The process that could report its end is dead.
        assert await child.wait() == -signal.SIGKILL
        child.kill()
        channel.sendall(b"hello")
        assert await asyncio.to_thread(channel.recv, 99) == b"hello"
    child, channel = await started(spawner, "pass")
    channel.close()
    assert await child.wait() == 0
    assert spawner.pid != first


async def test_one_that_hangs_is_replaced(spawner: Spawner, monkeypatch: pytest.MonkeyPatch) -> None:
    await spawner.open()
    assert spawner.pid is not None
    os.kill(spawner.pid, signal.SIGSTOP)
    monkeypatch.setattr(spawner_module, "START_SECONDS", 0.05)
    with pytest.raises(OSError, match="did not answer"):
        await started(spawner, ECHO)
    monkeypatch.undo()
    child, channel = await started(spawner, "pass")
    channel.close()
    assert await child.wait() == 0


async def test_one_that_cannot_be_asked_for_is_not_kept(
    spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for lack of memory in the kernel: other processes are started later all the same."""
    await spawner.open()

    def full(*_: Any) -> Never:
        raise OSError(errno.ENOBUFS, "no buffer space available")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "send_fds", full)
        with pytest.raises(OSError, match="no buffer space"):
            await started(spawner, ECHO)
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, Child)]
    child, channel = await started(spawner, "pass")
    channel.close()
    assert await child.wait() == 0


FEW_THREADS = """
import itertools, threading
from router.process import spawn_process

start, numbers = threading.Thread.start, itertools.count(1)

def limited(thread):
    if next(numbers) == {missing}:
        raise RuntimeError("no more threads")
    start(thread)

threading.Thread.start = limited
spawn_process.main()
"""


@pytest.mark.parametrize("missing", [3, 4], ids=["reads_its_output", "waits_for_its_end"])
async def test_one_for_which_a_thread_is_missing_ends_no_other(missing: int) -> None:
    """A process takes two threads, which the host may refuse: then that process does not run."""
    spawner = Spawner(("-c", FEW_THREADS.format(missing=missing)))
    first, channel = await started(spawner, ECHO)
    with channel:
        pid = spawner.pid
        second = started(spawner, "import time; time.sleep(3600)")
        if missing == 3:
            with pytest.raises(OSError, match="^no more threads$"):
                await second
        else:
            child, unused = await second
            unused.close()
            assert await child.wait() == -signal.SIGKILL
        third, unused = await started(spawner, "pass")
        unused.close()
        assert await third.wait() == 0
        channel.sendall(b"hello")
        assert await asyncio.to_thread(channel.recv, 99) == b"hello"
        assert await first.wait() == 0
        assert spawner.pid == pid
    await spawner.close()


async def test_it_ends_with_the_router() -> None:
    spawner = Spawner()
    child, channel = await started(spawner, "import socket; socket.socket(fileno=0).recv(1)")
    process = spawner.pid
    await spawner.close()
    await spawner.close()
    assert not os.path.exists(f"/proc/{process}")
    channel.close()
    await eventually(lambda: not os.path.exists(f"/proc/{child.pid}/exe"))


LONG = f"import os, sys; print('x' * {1 << 20}, flush=True); print('no memory for threads', file=sys.stderr)"


@pytest.mark.parametrize(
    ("ends", "how"),
    [
        ("sys.exit(3)", "it ended with exit code 3; it printed: xxx"),
        ("os.abort()", "it was ended by SIGABRT; .* more memory .*; it printed: xxx"),
        ("os.kill(os.getpid(), 9)", "it was killed .* see `dmesg`; it printed: xxx"),
    ],
)
async def test_one_that_ends_while_it_starts_shows_how_and_the_end_of_what_it_printed(
    spawner: Spawner, ends: str, how: str
) -> None:
    child, channel = await started(spawner, f"{LONG}; {ends}", discard_output=True)
    with channel:
        failure = await child.failure(EOFError("closed"))
    assert re.match(how, failure)
    assert failure.endswith("x\nno memory for threads")
    assert MAX_PRINTED - 10 < len(failure) < MAX_PRINTED + 200


async def test_one_that_hangs_while_it_starts_is_killed_and_shows_what_it_printed(
    spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawner_module, "OWN_END_SECONDS", 0.5)
    hangs = "import os, time; os.write(1, b'loading'); os.close(0); time.sleep(3600)"
    child, channel = await started(spawner, hangs, discard_output=True)
    with channel:
        assert await asyncio.to_thread(channel.recv, 1) == b""
        assert await child.failure(TimeoutError()) == "it was not ready in time; it printed: loading"
    monkeypatch.setattr(spawner_module, "OWN_END_SECONDS", PATIENCE)
    child, channel = await started(spawner, "pass", discard_output=True)
    channel.close()
    assert await child.failure(EOFError()) == "it ended with exit code 0; it printed nothing"


async def test_only_output_that_is_not_discarded_reaches_the_log(
    spawner: Spawner, capfd: pytest.CaptureFixture[str]
) -> None:
    for discard in (True, False):
        child, channel = await started(spawner, f"print({discard})", discard_output=discard)
        channel.close()
        assert await child.wait() == 0
    assert capfd.readouterr().err == "False\n"
