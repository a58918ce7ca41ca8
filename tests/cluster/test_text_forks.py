"""Forked text workers do what started ones do: jobs under limits, and an end that the router can explain."""

from __future__ import annotations

import os
import signal
from array import array
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
from tests.cluster.harness import MODEL, with_children
from tests.fakes.waiting import PATIENCE

JOB = EncodeTexts(False, PromptLength(100), ("prompt",))


async def test_jobs_limits_and_ends(tmp_path: Path, tokenizer: Tokenizer) -> None:
    spawner = Spawner(TEXT_FORKS)
    workers = [await start_worker(spawner, WorkerSettings(str(MODEL), 1 << 20)) for _ in range(2)]
    for worker in workers:
        head, ids = await worker.ask(JOB, msgspec.msgpack.encode(["one and one"]), PATIENCE)
        head.check()
        assert array("i", ids).tolist() == tokenizer.encode("one and one", add_special_tokens=False)
    _, first, second = with_children(Path(f"/proc/{spawner.pid}"))
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
