"""Unit tests of the times of a start-up."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.observability import start_times
from common.observability.start_times import StartTimes, count, process_age


def test_phases_begin_with_the_process_and_work_within_them_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(start_times, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(start_times, "process_age", lambda: 3.0)
    times = StartTimes()
    for phase, seconds in (("loading", 2.0), ("capturing", 47.0), ("loading", 60.5), ("capturing", 1.25)):
        now[0] += seconds
        times.enter(phase)
    now[0] += 4.0
    times.add("compilations", 0.5)
    times.add("compilations", 0.25)
    assert times.fields() == {
        "start_importing_s": 5.0,
        "start_loading_s": 48.25,
        "start_capturing_s": 64.5,
        "start_compilations": "2 in 0.75 s",
        "start_s": 117.75,
    }
    now[0] += 1.0
    assert times.fields()["start_capturing_s"] == 65.5


def test_work_is_counted_in_the_context_of_its_start() -> None:
    times = StartTimes()
    count("file_waits", 1.0)
    with times.counting():
        count("file_waits", 2.0)
    count("file_waits", 4.0)
    assert times.fields()["start_file_waits"] == "1 in 2.00 s"


def test_a_name_of_the_process_that_is_not_utf_8_does_not_matter() -> None:
    """The kernel cuts names at 15 bytes, which may be within a character."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(b"tandem \xc3")
    try:
        assert process_age() > 0
    finally:
        name.write_bytes(before.rstrip(b"\n"))  # the newline would become part of the name


def test_the_age_of_a_process_grows() -> None:
    before = process_age()
    time.sleep(0.03)
    assert 0.02 <= process_age() - before < 30
