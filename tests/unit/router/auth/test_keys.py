"""Keys that are added and removed while the router serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.api_key import ApiKey
from common.config.api_keys import read_api_keys
from common.errors import ConfigError
from common.observability.logs import Log
from router.auth import keys as auth_keys
from router.auth.keys import KeyFile, KeyRing
from tests.fakes.api_keys import api_key
from tests.fakes.waiting import eventually


class Watched:
    """A key file, and a key ring that follows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("a")
        self.ring = KeyRing(read_api_keys(path), lambda: 0.0)
        self.read = read_api_keys
        self.file = KeyFile(path, lambda path: self.read(path), self.ring.replace, Log("test"))
        self.task = asyncio.create_task(self.file.watch())

    def write(self, *names: str) -> None:
        """Replace the file atomically, as deploy/api_key does."""
        rows = [f"- {{id: {name}, sha256: '{api_key(name, name).sha256}'}}" for name in names]
        self.put("\n".join(rows) or "[]")

    def put(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.chmod(0o600)
        new.replace(self.path)

    def knows(self, *names: str) -> bool:
        return [name for name in ("a", "b", "c") if self.ring.find(name)] == list(names)


@pytest.fixture
async def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(auth_keys, "CHECK_SECONDS", 0.01)
    made = Watched(tmp_path / "keys.yaml")
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


async def test_a_changed_file_is_read_again(watched: Watched) -> None:
    assert watched.knows("a")
    watched.write("a", "b")
    await eventually(lambda: watched.knows("a", "b"))
    watched.write("c")
    await eventually(lambda: watched.knows("c"))
    watched.write()
    await eventually(lambda: watched.knows())


@pytest.mark.parametrize("text", ["", "keys: []", "- {id: b}", "[", "- {id: b, sha256: x}"])
async def test_a_broken_file_keeps_the_keys_before_it(
    watched: Watched, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watched.put(text)
    await eventually(lambda: "cannot reload the API keys" in caplog.text)
    assert watched.knows("a")
    watched.write("b")
    await eventually(lambda: watched.knows("b"))


async def test_a_file_that_is_gone_or_open_to_others_keeps_the_keys(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.path.unlink()
    await eventually(lambda: "cannot reload the API keys" in caplog.text)
    watched.write("a", "b")
    await eventually(lambda: watched.knows("a", "b"))
    caplog.clear()
    watched.path.chmod(0o644)
    await eventually(lambda: "cannot reload the API keys" in caplog.text)
    assert watched.knows("a", "b")


async def test_a_file_that_could_not_be_read_for_a_moment_is_read_again(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """It has not changed since, but a key revoked in it must not stay valid."""
    failures: list[Exception] = [ConfigError("security.api_keys", "too many open files")] * 3
    failures += [RuntimeError("can't start new thread")] * 3

    def read(path: Path) -> tuple[ApiKey, ...]:
        if failures:
            raise failures.pop()
        return read_api_keys(path)

    watched.read = read
    watched.write("b")
    await eventually(lambda: watched.knows("b"))
    assert caplog.text.count("cannot reload the API keys") == 2


async def test_a_reload_on_request_happens_at_once(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP reloads it whatever the time stamps say."""
    watched.task.cancel()
    monkeypatch.setattr(auth_keys, "CHECK_SECONDS", 3600.0)
    file = KeyFile(watched.path, lambda path: [api_key("c", "c")], watched.ring.replace, Log("test"))
    watched.task = asyncio.create_task(file.watch())
    file.ask()
    await eventually(lambda: watched.knows("c"))
