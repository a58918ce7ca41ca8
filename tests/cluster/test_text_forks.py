"""Forked text workers do what started ones do: jobs under limits, and an end that the router can explain."""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from common.errors import ModelError
from router.process.spawner import Spawner
from router.requests.prompt_length import PromptLength
from router.text.channel import start_worker
from router.text.jobs import EncodeTexts, WorkerSettings
from router.text.process import ADDRESS_SPACE, OPEN_FILES
from router.tokens.tokenizer import Tokenizer
from tests.cluster.fork_server import TEXT_FORKS
from tests.cluster.harness import MODEL
from tests.fakes.proc_files import with_children
from tests.fakes.text_fork_server import text_fork_program
from tests.fakes.waiting import PATIENCE, eventually

JOB = EncodeTexts(False, PromptLength(100), ("prompt",))


@pytest.mark.parametrize("program", [lambda: TEXT_FORKS, text_fork_program], ids=["itself", "a fork"])
async def test_jobs_limits_and_ends(
    tmp_path: Path, tokenizer: Tokenizer, program: Callable[[], Sequence[str]]
) -> None:
    spawner = Spawner(program())
    workers = [await start_worker(spawner, WorkerSettings(str(MODEL), 1 << 20)) for _ in range(2)]
    for worker in workers:
        head, ids = await worker.ask(JOB, msgspec.msgpack.encode(["one and one"]), PATIENCE)
        head.check()
        assert array("i", ids).tolist() == tokenizer.encode("one and one", add_special_tokens=False)

    def processes() -> list[Path]:
        return list(with_children(Path(f"/proc/{spawner.pid}")))

    # The client of a fork may show it later than the fork answers.
    await eventually(lambda: len(processes()) > len(workers))
    *_, first, second = processes()
    for line in (f"Max address space {ADDRESS_SPACE} ", f"Max open files {OPEN_FILES} ", "Max file size 0 "):
        assert line in " ".join((first / "limits").read_text().split())
    assert len(list((first / "fd").iterdir())) == 3
    os.kill(int(second.name), signal.SIGPROF)
    assert await workers[1].exit_code() == -signal.SIGPROF
    os.kill(int(first.name), signal.SIGSTOP)  # else it may end by itself first, because its channel is closed
    await workers[0].end()
    assert await workers[0].exit_code() == -signal.SIGKILL
    with pytest.raises(ModelError):
        await start_worker(spawner, WorkerSettings(str(tmp_path), 1 << 20))
    await spawner.close()


@pytest.mark.parametrize("killed", ["client", "fork"])
async def test_a_fork_and_its_client_end_together(killed: str) -> None:
    spawner = Spawner(text_fork_program())
    await spawner.open()

    def both() -> list[Path]:
        return list(with_children(Path(f"/proc/{spawner.pid}")))

    await eventually(lambda: len(both()) == 2)
    client, fork = both()
    os.kill(int((client if killed == "client" else fork).name), signal.SIGKILL)
    await eventually(lambda: not client.exists() and not fork.exists())
    await spawner.close()
