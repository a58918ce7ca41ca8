"""Limits of a key over several router processes, each of which has a file of its own."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, RateLimited
from router.auth import ledger
from router.auth.ledger import SharedLedger
from router.auth.quotas import Quota, Quotas
from tests.fakes.api_keys import api_key
from tests.fakes.clock import Clock
from tests.fakes.disks import FullDisk, mounted, small_disk
from tests.fakes.waiting import PATIENCE

__all__ = ["small_disk"]


class Host:
    """Router processes of one host, in one process."""

    def __init__(self, directory: Path, processes: int) -> None:
        self.clock = Clock()
        self.paths = [directory / f"{index}.use" for index in range(processes)]
        self.ledgers: dict[int, SharedLedger] = {}
        self.quotas: dict[int, Quotas] = {}

    def start(self, index: int) -> None:
        others = [path for path in self.paths if path != self.paths[index]]
        self.ledgers[index] = SharedLedger(self.paths[index], others)
        self.quotas[index] = Quotas(self.clock, self.ledgers[index])

    def end(self, index: int) -> None:
        self.ledgers.pop(index).close()

    def quota(self, index: int, **limits: int) -> Quota:
        return self.quotas[index].of(api_key("secret", "team", **limits))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path, 3)
    for index in range(3):
        made.start(index)
    yield made
    for index in list(made.ledgers):
        made.end(index)


def test_requests_per_minute_hold_for_all_processes_together(host: Host) -> None:
    admitted = 0
    for turn in range(30):
        quota = host.quota(turn % 3, requests_per_minute=10)
        try:
            quota.admit().release()
        except RateLimited:
            continue
        admitted += 1
    assert admitted == 10
    host.clock.now += 12.0
    for index in range(2):
        host.quota(index, requests_per_minute=10).admit().release()
    for index in range(3):
        with pytest.raises(RateLimited):
            host.quota(index, requests_per_minute=10).admit()
    assert host.quota(2, requests_per_minute=10).headers()["x-ratelimit-remaining-requests"] == "0"


def test_tokens_that_one_process_has_counted_are_spent_for_all(host: Host) -> None:
    for index in range(3):
        host.quota(index, tokens_per_minute=100).admit().release()
    host.quota(0, tokens_per_minute=100).spend(60)
    host.quota(1, tokens_per_minute=100).spend(70)
    for index in range(3):
        with pytest.raises(RateLimited, match="tokens_per_minute"):
            host.quota(index, tokens_per_minute=100).admit()
    host.clock.now += 30.0
    host.quota(2, tokens_per_minute=100).admit().release()


def test_prompts_in_flight_count_at_every_process(host: Host) -> None:
    claims = [host.quota(index, concurrency=3).admit() for index in range(3)]
    for index in range(3):
        with pytest.raises(RateLimited, match="and has 3"):
            host.quota(index, concurrency=3).admit()
    claims[0].release()
    last = host.quota(2, concurrency=3).admit()
    with pytest.raises(RateLimited):
        host.quota(0, concurrency=3).admit()
    for claim in (*claims[1:], last):
        claim.release()


def test_what_a_dead_process_had_in_flight_does_not_count_but_what_it_used_does(host: Host) -> None:
    limits = {"concurrency": 2, "requests_per_minute": 10}
    for _ in range(2):
        host.quota(0, **limits).admit()
    with pytest.raises(RateLimited, match="concurrency"):
        host.quota(1, **limits).admit()
    host.end(0)
    claim = host.quota(1, **limits).admit()
    assert host.quota(1, **limits).headers()["x-ratelimit-remaining-requests"] == "7"
    claim.release()


def test_what_a_process_had_in_flight_does_not_count_after_it_starts_again(host: Host) -> None:
    for _ in range(2):
        host.quota(0, concurrency=2).admit()
    host.end(0)
    host.start(0)
    claims = [host.quota(index, concurrency=2).admit() for index in (1, 2)]
    with pytest.raises(RateLimited, match="and has 2"):
        host.quota(0, concurrency=2).admit()
    for claim in claims:
        claim.release()


def test_a_process_that_starts_again_begins_with_what_the_others_have_left(host: Host) -> None:
    limits = {"requests_per_minute": 10, "tokens_per_minute": 100}
    for index in range(3):
        host.quota(index, **limits).admit().release()
    host.quota(0, **limits).spend(50)
    host.end(0)
    host.start(0)
    headers = host.quota(0, **limits).headers()
    assert headers["x-ratelimit-remaining-requests"] == "7"
    assert headers["x-ratelimit-remaining-tokens"] == "50"
    host.quota(0, **limits).admit().release()
    assert host.quota(1, **limits).headers()["x-ratelimit-remaining-requests"] == "6"


def test_a_key_that_was_removed_and_added_again_is_counted_on(host: Host) -> None:
    key = api_key("secret", "team", concurrency=5)
    claim = host.quotas[0].of(key).admit()
    host.quotas[0].replace([])
    host.quotas[0].replace([key])
    again = host.quotas[0].of(key).admit()
    claim.release()
    for _ in range(4):
        host.quotas[1].of(key).admit()
    with pytest.raises(RateLimited, match="and has 5"):
        host.quotas[2].of(key).admit()
    again.release()


def test_rows_of_removed_keys_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each key that ever existed would take one, and further keys would be limited at each process only."""
    monkeypatch.setattr(ledger, "MAX_KEYS", 2)
    host = Host(tmp_path, 2)
    host.start(0)
    host.start(1)
    for generation in range(5):
        keys = [api_key(f"{generation}{name}", f"{name}{generation}", requests_per_minute=3) for name in "ab"]
        for index in range(2):
            host.quotas[index].replace(keys)
        for key in keys:
            for turn in range(3):
                host.quotas[turn % 2].of(key).admit().release()
            for index in range(2):
                with pytest.raises(RateLimited):
                    host.quotas[index].of(key).admit()
    host.end(0)
    host.start(0)
    # A process that starts serves the keys that the file has then.
    later = [api_key("x", "later", requests_per_minute=1), api_key("y", "latest", requests_per_minute=1)]
    for index in range(2):
        host.quotas[index].replace(later)
    for key in later:
        host.quotas[0].of(key).admit().release()
        with pytest.raises(RateLimited):
            host.quotas[1].of(key).admit()
    for index in range(2):
        host.end(index)


def test_the_row_of_a_removed_key_stays_while_its_prompts_are_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MAX_KEYS", 1)
    host = Host(tmp_path, 2)
    host.start(0)
    host.start(1)
    old, new = (api_key(name, name, concurrency=1) for name in ("old", "new"))
    claim = host.quotas[0].of(old).admit()
    for index in range(2):
        host.quotas[index].replace([new])
    # Nothing is free yet: each process counts by itself.
    alone = [host.quotas[index].of(new).admit() for index in range(2)]
    claim.release()
    for each in alone:
        each.release()
    for index in range(2):
        host.quotas[index].replace([])
        host.quotas[index].replace([new])
    host.quotas[0].of(new).admit()
    with pytest.raises(RateLimited):
        host.quotas[1].of(new).admit()
    for index in range(2):
        host.end(index)


def test_a_key_that_was_added_again_begins_with_full_limits(host: Host) -> None:
    key, other = (api_key(name, name, requests_per_minute=10) for name in ("key", "other"))
    for _ in range(9):
        host.quotas[0].of(key).admit().release()
    assert host.quotas[1].of(key).headers()["x-ratelimit-remaining-requests"] == "1"
    host.quotas[0].replace([other])
    host.quotas[0].replace([key, other])
    host.quotas[0].of(key).admit().release()
    # The other process has not read the key file meanwhile, so it goes on with what it knows.
    assert host.quotas[1].of(key).headers()["x-ratelimit-remaining-requests"] == "0"


def test_keys_do_not_share_limits(host: Host) -> None:
    host.quotas[0].of(api_key("a", "a", requests_per_minute=1)).admit()
    host.quotas[1].of(api_key("b", "b", requests_per_minute=1)).admit()


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["admit", "end", "restart"])), max_size=60)
)
def test_the_limits_are_never_exceeded(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str]]
) -> None:
    """Processes admit, release and restart in any order; the clock stands still."""
    host = Host(tmp_path_factory.mktemp("host"), 3)
    for index in range(3):
        host.start(index)
    limits = {"requests_per_minute": 20, "concurrency": 4}
    claims: dict[int, list[object]] = {index: [] for index in range(3)}
    admitted = 0
    for index, step in steps:
        if step == "restart":
            host.end(index)
            host.start(index)
            claims[index] = []
        elif step == "end" and claims[index]:
            claims[index].pop().release()  # type: ignore[attr-defined]
        elif step == "admit":
            running = sum(map(len, claims.values()))
            try:
                claims[index].append(host.quota(index, **limits).admit())
            except RateLimited:
                continue
            admitted += 1
            assert running < 4
    for index in range(3):
        host.end(index)
    assert admitted <= 20


def test_a_second_process_with_the_same_number_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "LOCK_SECONDS", 0.0)
    first = SharedLedger(tmp_path / "0", [])
    with pytest.raises(ConfigError, match="another process uses"):
        SharedLedger(tmp_path / "0", [])
    first.close()
    SharedLedger(tmp_path / "0", []).close()


def test_a_key_for_which_there_is_no_row_is_counted_by_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MAX_KEYS", 1)
    host = Host(tmp_path, 2)
    host.start(0)
    host.start(1)
    for index in range(2):
        host.quota(index, requests_per_minute=2).admit()
    for index in range(2):
        further = host.quotas[index].of(api_key("x", "further", requests_per_minute=1))
        further.admit()
        with pytest.raises(RateLimited):
            further.admit()
        with pytest.raises(RateLimited):
            host.quota(index, requests_per_minute=2).admit()
    for index in range(2):
        host.end(index)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"process\.run_dir: cannot use"):
        SharedLedger(tmp_path / "missing" / "0", [])


def test_two_real_processes_share_a_limit(tmp_path: Path) -> None:
    """Each admits as fast as it can. They may both take the last request at the same instant: one too many."""
    program = (
        "import sys, time; from pathlib import Path; from common.errors import RateLimited\n"
        "from router.auth.ledger import SharedLedger; from router.auth.quotas import Quotas\n"
        "from tests.fakes.api_keys import api_key\n"
        "own, other = map(Path, sys.argv[1:3])\n"
        "ledger = SharedLedger(own, [other])\n"
        "quota = Quotas(lambda: 0.0, ledger).of(api_key('s', 'k', requests_per_minute=2000))\n"
        "done = 0\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "try:\n"
        "    while True:\n"
        "        quota.admit().release(); done += 1\n"
        "except RateLimited:\n"
        "    print(done, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, *order],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        for order in (paths, paths[::-1])
    ]
    try:
        for each in started:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        for each in started:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()
        done = [int(each.stdout.readline()) for each in started if each.stdout is not None]
    finally:
        for each in started:
            each.communicate("end\n", timeout=60)
    assert 2000 <= sum(done) <= 2001


def test_a_limit_that_is_added_later_begins_full(host: Host) -> None:
    """While the key had no limit of tokens, what is left of it was not low but unlimited."""
    host.quota(0, requests_per_minute=10).admit().release()
    host.quota(1, requests_per_minute=10, tokens_per_minute=100).admit().release()
    host.quota(1, requests_per_minute=10, tokens_per_minute=100).spend(99)
    assert (
        host.quota(2, requests_per_minute=10, tokens_per_minute=100).headers()["x-ratelimit-remaining-tokens"]
        == "1"
    )


def test_a_dead_process_is_known_as_dead_while_another_one_looks_too(host: Host) -> None:
    host.quota(0, concurrency=1).admit()
    host.end(0)
    with host.paths[0].open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # as another process does for a moment
        host.quota(1, concurrency=1).admit()


USES_MANY_KEYS = """
import sys
from pathlib import Path
from router.auth.ledger import Levels, SharedLedger, Use
made = SharedLedger(Path(sys.argv[1]), [Path(sys.argv[2])])
print("started", flush=True)
sys.stdin.readline()
for index in range(1000):
    made.key(f"key {index}").add(Use(1, 1, 1), Levels(1.0, 1.0, 1.0))
print(made.key("key 999").running(), flush=True)
"""


def test_further_keys_need_no_room_on_a_disk_that_has_become_full() -> None:
    """A page of a mapped file for which there is no room ends the process that touches it, with SIGBUS."""
    with mounted("8m") as disk:
        command = [sys.executable, "-c", USES_MANY_KEYS, str(disk.path / "0.use"), str(disk.path / "1.use")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            disk.fill()
            said, _ = process.communicate("\n", PATIENCE)
        assert (process.returncode, said) == (0, "0\n")


def test_a_disk_without_room_for_the_file_is_a_refusal(small_disk: FullDisk) -> None:
    with pytest.raises(ConfigError, match=r"process\.run_dir: cannot use .*0\.use: No space left on device"):
        SharedLedger(small_disk.path / "0.use", [])
