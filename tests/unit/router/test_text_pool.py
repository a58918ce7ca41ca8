"""Text workers as processes: limits, deadlines, restarts, queues."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Never

import msgspec
import pytest

from common.errors import InvalidRequest, ModelError, Overloaded
from common.observability.logs import Log
from router import text_pool
from router.openai_schema import Message
from router.spawner import Spawner
from router.text_channel import TextChannel, start_worker
from router.text_jobs import Answer, EncodeTexts, Job, ReadCompletion, RenderChat, Settings
from router.text_pool import Lane, TextPool
from router.text_service import TextService
from router.text_work import TextWork
from router.tokenizer import Tokenizer
from tests.fakes.text_workers import InProcess
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.router.conftest import TINY

HI = [Message("user", "hi")]
CHAT = RenderChat(False, 4096)
TEXTS = EncodeTexts(False, 1 << 30, ("prompt",))
Open = Callable[..., Awaitable[Lane]]


def program(**constants: int) -> tuple[str, str]:
    """A worker with other limits."""
    lines = "".join(f"text_process.{name} = {value}; " for name, value in constants.items())
    return "-c", f"from router import text_process; {lines}text_process.main()"


@pytest.fixture
async def lane(spawner: Spawner, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Open]:
    """Open lanes of one worker each."""
    monkeypatch.setattr(text_pool, "WORKERS", 1)
    lanes: list[Lane] = []

    async def opened(path: Path = TINY, seconds: float = PATIENCE, **constants: int) -> Lane:
        start = partial(start_worker, spawner, Settings(str(path), 64 << 20), program(**constants))
        lanes.append(Lane(start, seconds, Log("test")))
        await lanes[-1].open()
        return lanes[-1]

    yield opened
    for each in lanes:
        await each.close()


def worker_of(lane: Lane) -> TextChannel:
    [worker] = lane._all
    return worker


def pid(lane: Lane) -> int:
    process = worker_of(lane)._process
    assert process is not None
    return process.pid


async def done(lane: Lane, job: Job, payload: bytes) -> Answer:
    """Run a job. Raises what the worker raised."""
    answer, _ = await lane.run(job, payload)
    answer.check()
    return answer


def model(folder: Path, template: str) -> Path:
    (folder / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


async def test_workers_give_the_same_tokens_and_refusals(spawner: Spawner) -> None:
    tokenizer = Tokenizer(TINY)
    pool = TextPool(spawner, TINY, 1 << 20, Log("test"))
    await pool.start()
    try:
        here = TextService(InProcess(TextWork.load(TINY)), tokenizer)
        there = TextService(pool, tokenizer)
        for service in (here, there):
            assert tokenizer.decode(await service.chat_prompt(HI, False, 4096), False).startswith("<|bos|>")
            with pytest.raises(InvalidRequest, match="unknown role nobody") as found:
                await service.chat_prompt([Message("nobody", "x")], False, 4096)
            assert found.value.param == "messages"
        texts = ["a b c " * 2000, "x", "é" * 50_000]
        fields = ["prompt[0]", "prompt[1]", "prompt[2]"]
        encoded = [await each.encode(texts, True, 1 << 20, fields) for each in (here, there)]
        assert encoded[0] == encoded[1] == [tokenizer.encode(text, True) for text in texts]
        raw = bytearray(json.dumps({"prompt": [5, 700] * 50_000, "user": [[]] * 1000}).encode())
        read = [await each.read_completion(raw, 1 << 20) for each in (here, there)]
        assert read[0] == read[1]
        assert read[0].user is None
        for answers in ([await each.tokenize(raw[:0] + b'{"prompt":"a"}', 5) for each in (here, there)],):
            assert answers[0] == answers[1]
    finally:
        await pool.close()


async def test_a_template_that_takes_too_long_costs_one_worker(lane: Open, tmp_path: Path) -> None:
    """Comparing two nested lists of 2 ** 40 items is a single operation, which no budget of steps can limit."""
    nested = "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}"
    bomb = "{% for i in range(40) %}" + nested + "{% endfor %}{{ n.a == n.b }}"
    source = (
        "{% set n = namespace(a=[1], b=[1]) %}{% if messages[0].content == 'bomb' %}" + bomb + "{% endif %}ok"
    )
    opened = await lane(model(tmp_path, source))
    before = pid(opened)
    with pytest.raises(InvalidRequest, match="too much time or memory") as found:
        await opened.run(CHAT, msgspec.msgpack.encode([Message("user", "bomb")]))
    assert found.value.param == "messages"
    answer, _ = await opened.run(CHAT, msgspec.msgpack.encode(HI))
    assert answer.counts[0] > 0
    assert pid(opened) != before


async def test_a_job_that_takes_too_much_memory_is_refused(lane: Open) -> None:
    """Either Python raises an error and the worker lives, or a library aborts and it dies."""
    opened = await lane(ADDRESS_SPACE=512 << 20)
    with pytest.raises(InvalidRequest, match="encoding the prompt takes too much") as found:
        await done(opened, TEXTS, msgspec.msgpack.encode(["1é" * (4 << 20)]))
    assert found.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="reading the body takes too much"):
        await done(opened, ReadCompletion(4096), b'{"prompt":[' + b"{}," * (10 << 20) + b"0]}")
    answer, _ = await opened.run(TEXTS, msgspec.msgpack.encode(["a"]))
    assert answer.counts == (1,)


async def test_a_job_whose_worker_is_killed_is_done_by_the_next(lane: Open) -> None:
    opened = await lane()
    text = "hello world " * 100_000
    job = asyncio.create_task(opened.run(TEXTS, msgspec.msgpack.encode([text])))
    await eventually(lambda: not opened._idle)
    os.kill(pid(opened), signal.SIGKILL)
    answer, packed = await job
    assert answer.counts[0] * 4 == len(packed)


async def test_an_idle_worker_that_dies_is_replaced(lane: Open) -> None:
    opened = await lane()
    before = pid(opened)
    os.kill(before, signal.SIGKILL)
    await eventually(lambda: opened._idle and pid(opened) != before)
    assert (await opened.run(TEXTS, msgspec.msgpack.encode(["a"])))[0].counts == (1,)


async def test_a_stopped_worker_is_killed_and_the_client_may_come_again(lane: Open) -> None:
    opened = await lane(seconds=0.05)
    before = pid(opened)
    os.kill(before, signal.SIGSTOP)
    with pytest.raises(Overloaded):
        await opened.run(TEXTS, msgspec.msgpack.encode(["a"]))
    await eventually(lambda: opened._idle and pid(opened) != before)


async def test_a_client_that_leaves_costs_no_worker_and_no_turn(lane: Open) -> None:
    opened = await lane()
    before = pid(opened)
    os.kill(before, signal.SIGSTOP)
    jobs = [
        asyncio.create_task(opened.run(TEXTS, msgspec.msgpack.encode([each]))) for each in ("a", "b", "a b")
    ]
    await eventually(lambda: len(opened._waiting) == 2)
    jobs[0].cancel()
    jobs[1].cancel()
    await asyncio.wait(jobs[:2])
    os.kill(before, signal.SIGCONT)
    answer, _ = await jobs[2]
    assert answer.counts == (2,)
    assert pid(opened) == before
    assert (len(opened._idle), len(opened._waiting), opened._waiting_bytes) == (1, 0, 0)


async def test_a_client_that_leaves_in_the_moment_that_a_worker_gets_free(lane: Open) -> None:
    opened = await lane()
    worker = opened._idle.pop()
    job = asyncio.create_task(opened.run(TEXTS, msgspec.msgpack.encode(["a"])))
    await eventually(lambda: opened._waiting)
    job.cancel()
    opened._give(worker)  # before the job has noticed its cancellation
    with pytest.raises(asyncio.CancelledError):
        await job
    assert (opened._idle, len(opened._waiting), opened._waiting_bytes) == ([worker], 0, 0)


async def test_workers_are_replaced_once_there_are_descriptors_again(
    lane: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = await lane()
    pairs = socket.socketpair
    failures = [OSError(errno.EMFILE, "too many open files")]
    monkeypatch.setattr(socket, "socketpair", lambda: pairs() if not failures else _raise(failures.pop()))
    monkeypatch.setattr(text_pool, "RESTART_SECONDS", 0.0)
    os.kill(pid(opened), signal.SIGKILL)
    await eventually(lambda: not failures and opened._idle)
    assert (await opened.run(TEXTS, msgspec.msgpack.encode(["a"])))[0].counts == (1,)


def _raise(error: Exception) -> Never:
    raise error


@pytest.mark.parametrize("bound", ["MAX_WAITING", "MAX_WAITING_BYTES"])
async def test_what_waits_is_bounded(lane: Open, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = await lane()
    monkeypatch.setattr(text_pool, bound, {"MAX_WAITING": 1, "MAX_WAITING_BYTES": 5}[bound])
    stopped = pid(opened)
    os.kill(stopped, signal.SIGSTOP)
    payload = msgspec.msgpack.encode(["a"])
    jobs = [asyncio.create_task(opened.run(TEXTS, payload)) for _ in range(3)]
    done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_EXCEPTION)
    assert done
    for job in done:
        with pytest.raises(Overloaded, match="try again"):
            await job
    os.kill(stopped, signal.SIGCONT)
    assert (await jobs[0])[0].counts == (1,)
    await asyncio.wait(jobs)
    assert (len(opened._waiting), opened._waiting_bytes) == (0, 0)


async def test_a_job_waits_for_a_worker_no_longer_than_it_may_take(lane: Open) -> None:
    opened = await lane()
    stopped = pid(opened)
    os.kill(stopped, signal.SIGSTOP)
    payload = msgspec.msgpack.encode(["a"])
    first = asyncio.create_task(opened.run(TEXTS, payload))
    await eventually(lambda: not opened._idle)
    opened._seconds = 0.05
    with pytest.raises(Overloaded, match="try again"):
        await opened.run(TEXTS, payload)
    os.kill(stopped, signal.SIGCONT)
    assert (await first)[0].counts == (1,)
    assert (len(opened._waiting), opened._waiting_bytes) == (0, 0)


async def test_large_jobs_do_not_hold_up_small_ones(spawner: Spawner) -> None:
    pool = TextPool(spawner, TINY, 1 << 20, Log("test"))
    await pool.start()
    try:
        await eventually(lambda: len(pool._large._all) == text_pool.WORKERS)
        for worker in pool._large._all:
            assert worker._process is not None
            os.kill(worker._process.pid, signal.SIGSTOP)
        large = [
            asyncio.create_task(pool.run(TEXTS, msgspec.msgpack.encode(["a" * 100_000]))) for _ in range(5)
        ]
        await eventually(lambda: pool._large._waiting)
        assert (await pool.run(TEXTS, msgspec.msgpack.encode(["a"])))[0].counts == (1,)
        for worker in pool._large._all:
            assert worker._process is not None
            os.kill(worker._process.pid, signal.SIGCONT)
        assert {(await each)[0].counts for each in large} == {(100_000,)}
    finally:
        await pool.close()


async def test_models_that_no_worker_can_read_are_refused_at_the_start(
    spawner: Spawner, tmp_path: Path
) -> None:
    pool = TextPool(spawner, model(tmp_path, "{% for %}"), 1 << 20, Log("test"))
    with pytest.raises(ModelError, match="cannot be compiled"):
        await pool.start()
    assert not pool._small._all
    assert not pool._large._all


async def test_workers_take_the_template_that_is_given(spawner: Spawner, tmp_path: Path) -> None:
    given = tmp_path / "mine.jinja"
    given.write_text("{% for %}")
    pool = TextPool(spawner, TINY, 1 << 20, Log("test"), template=given)
    with pytest.raises(ModelError, match=f"{given}: the chat template cannot be compiled"):
        await pool.start()


async def test_each_worker_checks_the_manifest_again(spawner: Spawner, tmp_path: Path) -> None:
    """This includes a replacement worker: a file was swapped after the router's own check."""
    folder = tmp_path / "model"
    folder.mkdir()
    model(folder, "{{ messages[0].content }}")
    manifest = tmp_path / "MANIFEST"
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in folder.iterdir()]
    manifest.write_text("\n".join(sums) + "\n")
    pool = TextPool(spawner, folder, 1 << 20, Log("test"), manifest)
    await pool.start()
    try:
        model(folder, "swapped: {{ messages[0].content }}")
        with pytest.raises(ModelError, match=r"tokenizer_config\.json has the SHA-256 sum"):
            await pool._small._start()
    finally:
        await pool.close()
