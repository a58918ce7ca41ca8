"""Text workers as processes: limits, deadlines, restarts, queues."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import os
import signal
import socket
from array import array
from asyncio import Future
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Never

import msgspec
import pytest

from common.errors import InternalError, InvalidRequest, ModelError, Overloaded
from common.observability.logs import Log
from router.process import spawner as spawner_module
from router.process.spawner import Child, Spawner
from router.requests.chat_input import ChatInput
from router.requests.field_rules import UnknownFields
from router.requests.openai_schema import Message
from router.requests.prompt_length import PromptLength
from router.templates.prompt_end import PromptEnd
from router.text import pool as text_pool
from router.text.channel import TextChannel, start_worker
from router.text.jobs import (
    EncodeTexts,
    Job,
    JobAnswer,
    JobResult,
    Payload,
    ReadCompletion,
    RenderChat,
    WorkerSettings,
)
from router.text.pool import TextPool, WorkerLane
from router.text.service import TextService
from router.text.work import TextWork
from router.tokens.tokenizer import Tokenizer
from tests.fakes.text_workers import InProcess
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.router.conftest import SERVED, TINY

HI = [Message("user", "hi")]
LENGTH = PromptLength(4096)
CHAT = RenderChat(False, LENGTH, PromptEnd.GENERATION_PROMPT)
TEXTS = EncodeTexts(False, PromptLength(1 << 30), ("prompt",))
Open = Callable[..., Awaitable[WorkerLane]]


def program(**constants: int) -> tuple[str, str]:
    """Return the program of a worker with other limits."""
    lines = "".join(f"process.{name} = {value}; " for name, value in constants.items())
    return "-c", f"from router.text import process; {lines}process.main()"


NICE = ContextVar("NICE", default=0)


class Spawned(Spawner):
    """Records the processes that it starts, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.pids: list[int] = []
        self.nice: list[int] = []  # what each was told, if `start_in_lane` starts them

    async def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        answers: bool = False,
        discard_output: bool = False,
    ) -> tuple[Child, socket.socket]:
        child, channel = await super().start(arguments, environment, answers, discard_output)
        self.pids.append(child.pid)
        self.nice.append(NICE.get())
        return child, channel

    def signal(self, number: int) -> None:
        """Signal the process that was started last."""
        os.kill(self.pids[-1], number)


async def start_in_lane(spawner: Spawner, settings: WorkerSettings) -> TextChannel:
    """Start a worker; its lane shows in its priority, which is lower for large jobs."""
    NICE.set(settings.nice)
    return await start_worker(spawner, settings)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give workers and their ends time on a busy machine. Tests of a deadline set their own."""
    for name in ("SMALL_SECONDS", "LARGE_SECONDS"):
        monkeypatch.setattr(text_pool, name, PATIENCE)
    monkeypatch.setattr(spawner_module, "OWN_END_SECONDS", PATIENCE)


@pytest.fixture
async def spawned() -> AsyncIterator[Spawned]:
    made = Spawned()
    yield made
    await made.close()


@pytest.fixture
async def lane(monkeypatch: pytest.MonkeyPatch, spawned: Spawned) -> AsyncIterator[Open]:
    """Open lanes of one worker each; `spawned` has the processes of all of them."""
    monkeypatch.setattr(text_pool, "WORKERS", 1)
    lanes: list[WorkerLane] = []

    async def opened(path: Path = TINY, seconds: float = PATIENCE, **constants: int) -> WorkerLane:
        start = partial(start_worker, spawned, WorkerSettings(str(path), 64 << 20), program(**constants))
        lanes.append(WorkerLane(start, seconds, Log("test")))
        await lanes[-1].open()
        return lanes[-1]

    yield opened
    for each in lanes:
        await each.close()


async def ask(lane: WorkerLane, *texts: str) -> list[asyncio.Task[JobAnswer]]:
    """Return jobs that have reached a worker or the queue by now: that takes at most one turn of the loop."""
    jobs = [asyncio.create_task(lane.run(TEXTS, msgspec.msgpack.encode([text]))) for text in texts]
    await asyncio.sleep(0)
    return jobs


async def holds_nothing(lane: WorkerLane, spawned: Spawned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return whether its worker is idle and its queue holds no job and no bytes."""
    size = len(msgspec.msgpack.encode(["a"]))
    with monkeypatch.context() as bounds:
        bounds.setattr(text_pool, "MAX_WAITING", 1)
        bounds.setattr(text_pool, "MAX_WAITING_BYTES", size)
        spawned.signal(signal.SIGSTOP)
        working, waiting, refused = await ask(lane, "a", "a", "a")
        with pytest.raises(Overloaded):
            await refused
        spawned.signal(signal.SIGCONT)
        assert [(await job)[0].counts for job in (working, waiting)] == [(1,), (1,)]


async def done(lane: WorkerLane, job: Job, payload: bytes) -> JobResult:
    """Run a job. Raises what the worker raised."""
    answer, _ = await lane.run(job, payload)
    answer.check()
    return answer


def model(folder: Path, template: str) -> Path:
    (folder / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


async def test_workers_give_the_same_tokens_and_refusals(spawned: Spawned) -> None:
    tokenizer = Tokenizer(TINY)
    pool = TextPool(spawned, TINY, 1 << 20, Log("test"))
    await pool.start()
    try:
        here = TextService(InProcess(TextWork.load(TINY)), tokenizer, UnknownFields(Log("test")))
        there = TextService(pool, tokenizer, UnknownFields(Log("test")))
        for service in (here, there):
            assert tokenizer.decode(
                await service.chat_prompt(ChatInput(HI), False, LENGTH, PromptEnd.GENERATION_PROMPT), False
            ).startswith("<|bos|>")
            with pytest.raises(InvalidRequest, match="unknown role nobody") as found:
                await service.chat_prompt(
                    ChatInput([Message("nobody", "x")]), False, LENGTH, PromptEnd.GENERATION_PROMPT
                )
            assert found.value.param == "messages"
        texts = ["a b c " * 2000, "x", "é" * 50_000]
        fields = ["prompt[0]", "prompt[1]", "prompt[2]"]
        encoded = [await each.encode(texts, True, PromptLength(1 << 20), fields) for each in (here, there)]
        assert encoded[0] == encoded[1] == [array("i", tokenizer.encode(text, True)) for text in texts]
        raw = bytearray(json.dumps({"prompt": [5, 700] * 50_000, "user": [[]] * 1000}).encode())
        read = [await each.read_completion(raw, 1 << 20) for each in (here, there)]
        assert read[0] == read[1]
        for answers in (
            [await each.tokenize(raw[:0] + b'{"prompt":"a"}', SERVED) for each in (here, there)],
        ):
            assert answers[0] == answers[1]
    finally:
        await pool.close()


async def test_a_template_that_takes_too_long_costs_one_worker(
    lane: Open, spawned: Spawned, tmp_path: Path
) -> None:
    """Comparing two nested lists of 2 ** 40 items is a single operation, which no budget of steps can limit."""
    nested = "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}"
    bomb = "{% for i in range(40) %}" + nested + "{% endfor %}{{ n.a == n.b }}"
    source = (
        "{% set n = namespace(a=[1], b=[1]) %}{% if messages[0].content == 'bomb' %}" + bomb + "{% endif %}ok"
    )
    opened = await lane(model(tmp_path, source))
    with pytest.raises(InvalidRequest, match="too much time or memory") as found:
        await opened.run(CHAT, msgspec.msgpack.encode(ChatInput([Message("user", "bomb")])))
    assert found.value.param == "messages"
    answer, _ = await opened.run(CHAT, msgspec.msgpack.encode(ChatInput(HI)))
    assert answer.counts[0] > 0
    assert len(spawned.pids) == 2


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


async def test_a_job_whose_worker_is_killed_is_done_by_the_next_worker(lane: Open, spawned: Spawned) -> None:
    opened = await lane()
    [job] = await ask(opened, "hello world " * 100_000)
    spawned.signal(signal.SIGKILL)
    answer, packed = await job
    assert answer.counts[0] * 4 == len(packed)
    assert len(spawned.pids) == 2


async def test_an_idle_worker_that_dies_is_replaced(lane: Open, spawned: Spawned) -> None:
    opened = await lane()
    spawned.signal(signal.SIGKILL)
    await eventually(lambda: len(spawned.pids) == 2)
    assert (await opened.run(TEXTS, msgspec.msgpack.encode(["a"])))[0].counts == (1,)


async def test_a_stopped_worker_is_killed_and_the_client_may_retry(lane: Open, spawned: Spawned) -> None:
    opened = await lane(seconds=0.05)
    spawned.signal(signal.SIGSTOP)
    with pytest.raises(Overloaded):
        await opened.run(TEXTS, msgspec.msgpack.encode(["a"]))
    await eventually(lambda: len(spawned.pids) == 2)


async def test_a_client_that_leaves_costs_no_worker_and_no_turn(
    lane: Open, spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = await lane()
    spawned.signal(signal.SIGSTOP)
    jobs = await ask(opened, "a", "b", "a b")
    jobs[0].cancel()
    jobs[1].cancel()
    await asyncio.wait(jobs[:2])
    spawned.signal(signal.SIGCONT)
    answer, _ = await jobs[2]
    assert answer.counts == (2,)
    await holds_nothing(opened, spawned, monkeypatch)
    assert len(spawned.pids) == 1


class Silent(TextChannel):
    """A worker that answers when the test says so, however long that takes."""

    def ask(self, job: Job | WorkerSettings, payload: Payload, seconds: float) -> Future[JobAnswer]:
        self.answer = asyncio.get_running_loop().create_future()
        return self.answer

    def say(self) -> None:
        self.answer.set_result((JobResult((1,)), b""))


async def silent_lane(monkeypatch: pytest.MonkeyPatch, seconds: float) -> tuple[WorkerLane, Silent]:
    monkeypatch.setattr(text_pool, "WORKERS", 1)
    silent = Silent(1 << 20)

    async def start() -> TextChannel:
        return silent

    opened = WorkerLane(start, seconds, Log("test"))
    await opened.open()
    return opened, silent


async def test_a_client_that_leaves_just_as_a_worker_becomes_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, silent = await silent_lane(monkeypatch, PATIENCE)
    working, waiting = await ask(opened, "a", "a")
    silent.say()
    await asyncio.sleep(0)  # by now the worker is given to the one that waits, which does not know it yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await working)[0].counts == (1,)
    monkeypatch.setattr(text_pool, "MAX_WAITING", 0)
    [another] = await ask(opened, "a")  # a worker has to be idle, since nobody may wait
    silent.say()
    assert (await another)[0].counts == (1,)


async def test_workers_are_replaced_once_there_are_descriptors_again(
    lane: Open, spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = await lane()
    pairs = socket.socketpair
    failures = [OSError(errno.EMFILE, "too many open files")]
    monkeypatch.setattr(socket, "socketpair", lambda: pairs() if not failures else _raise(failures.pop()))
    monkeypatch.setattr(text_pool, "RESTART_SECONDS", 0.0)
    spawned.signal(signal.SIGKILL)
    await eventually(lambda: not failures and len(spawned.pids) == 2)
    assert (await opened.run(TEXTS, msgspec.msgpack.encode(["a"])))[0].counts == (1,)


def _raise(error: Exception) -> Never:
    raise error


@pytest.mark.parametrize("bound", ["MAX_WAITING", "MAX_WAITING_BYTES"])
async def test_waiting_jobs_are_bounded(
    lane: Open, spawned: Spawned, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = await lane()
    monkeypatch.setattr(text_pool, bound, {"MAX_WAITING": 1, "MAX_WAITING_BYTES": 5}[bound])
    spawned.signal(signal.SIGSTOP)
    payload = msgspec.msgpack.encode(["a"])
    jobs = [asyncio.create_task(opened.run(TEXTS, payload)) for _ in range(3)]
    done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_EXCEPTION)
    assert done
    for job in done:
        with pytest.raises(Overloaded, match="try again"):
            await job
    spawned.signal(signal.SIGCONT)
    assert (await jobs[0])[0].counts == (1,)
    await asyncio.wait(jobs)
    await holds_nothing(opened, spawned, monkeypatch)


async def test_a_job_waits_for_a_worker_no_longer_than_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, silent = await silent_lane(monkeypatch, 0.05)
    working, waiting = await ask(opened, "a", "a")
    with pytest.raises(Overloaded, match="try again"):
        await waiting
    assert not working.done()
    silent.say()
    assert (await working)[0].counts == (1,)


async def test_large_jobs_do_not_hold_up_small_ones(
    spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pool, "start_worker", start_in_lane)
    pool = TextPool(spawned, TINY, 1 << 20, Log("test"))
    await pool.start()
    try:
        await eventually(lambda: spawned.nice.count(text_pool.LARGE_NICE) == text_pool.WORKERS)
        workers = zip(spawned.pids, spawned.nice, strict=True)
        slow = [pid for pid, nice in workers if nice == text_pool.LARGE_NICE]
        for pid in slow:
            os.kill(pid, signal.SIGSTOP)
        payload = msgspec.msgpack.encode(["a" * 100_000])
        large = [asyncio.create_task(pool.run(TEXTS, payload)) for _ in range(5)]
        await asyncio.sleep(0)
        assert (await pool.run(TEXTS, msgspec.msgpack.encode(["a"])))[0].counts == (1,)
        assert not any(job.done() for job in large)
        for pid in slow:
            os.kill(pid, signal.SIGCONT)
        assert {(await each)[0].counts for each in large} == {(100_000,)}
    finally:
        await pool.close()


async def test_models_that_no_worker_can_read_are_refused_at_the_start(
    tmp_path: Path, spawned: Spawned
) -> None:
    pool = TextPool(spawned, model(tmp_path, "{% for %}"), 1 << 20, Log("test"))
    with pytest.raises(ModelError, match="cannot be compiled"):
        await pool.start()
    assert spawned.pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in spawned.pids)


async def test_one_that_ends_while_it_starts_says_how_and_what_it_printed(spawned: Spawned) -> None:
    """So does one whose libraries cannot be loaded, which holds its channel until it has printed that."""
    settings = WorkerSettings(str(TINY), 1 << 20)
    for lines in ("import nothing", program(_settings=0)[1]):
        with pytest.raises(
            InternalError, match=r"cannot be started: it ended with exit code 1; it printed: (?s:.*)Error:"
        ):
            await start_worker(spawned, settings, ("-c", lines))


async def test_workers_take_the_template_that_is_given(spawned: Spawned, tmp_path: Path) -> None:
    given = tmp_path / "mine.jinja"
    given.write_text("{% for %}")
    pool = TextPool(spawned, TINY, 1 << 20, Log("test"), template=given)
    with pytest.raises(ModelError, match=f"{given}: the chat template cannot be compiled"):
        await pool.start()


def reason(record: logging.LogRecord) -> str:
    """Return why something failed, as the log of a process has it."""
    return str(getattr(record, "fields", {}).get("reason", ""))


async def test_each_worker_checks_the_manifest_again(
    tmp_path: Path, spawned: Spawned, caplog: pytest.LogCaptureFixture
) -> None:
    """This includes a replacement worker: a file was swapped after the router's own check."""
    folder = tmp_path / "model"
    folder.mkdir()
    model(folder, "{{ messages[0].content }}")
    manifest = tmp_path / "MANIFEST"
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in folder.iterdir()]
    manifest.write_text("\n".join(sums) + "\n")
    pool = TextPool(spawned, folder, 1 << 20, Log("test"), manifest)
    await pool.start()
    try:
        model(folder, "swapped: {{ messages[0].content }}")
        with contextlib.suppress(ProcessLookupError):  # it was still starting, and has refused the new file
            spawned.signal(signal.SIGKILL)
        await eventually(
            lambda: "tokenizer_config.json has the SHA-256 sum" in "".join(map(reason, caplog.records))
        )
    finally:
        await pool.close()
