"""The event log writes lines per flush, names their source, and survives a disk that accepts nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from common.config import load_cluster
from common.config.run_directory import event_directory
from common.messages.generation import OutputToken
from common.observability.event_log import NO_EVENTS, FileEventLog, event_log
from common.observability.logs import Log

INCARNATION = "ab" * 16


def lines_of(directory: Path) -> list[dict[str, object]]:
    (file,) = directory.iterdir()
    assert file.name == f"decode-0-{INCARNATION}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_events_are_written_once_per_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "made" / "events"
    events = FileEventLog(directory, "decode-0", INCARNATION, Log("test"), clock=lambda: 12.5)
    writes: list[bytes] = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append(data) or real(fd, data))
    events.add("taken", 7, request="r")
    events.add_tokens("tokens", 3, [OutputToken(5, None), OutputToken(6, None)], 7, finish=None)
    assert len(lines_of(directory)) == 1
    events.flush()
    events.flush()
    assert len(writes) == 1
    start, taken, tokens = lines_of(directory)
    assert (start["event"], start["node"], start["incarnation"]) == ("start", "decode-0", INCARNATION)
    assert taken == {"t": 12.5, "event": "taken", "room": 7, "request": "r"}
    assert tokens == {"t": 12.5, "event": "tokens", "room": 7, "offset": 3, "ids": [5, 6], "finish": None}
    events.close()


def test_an_event_loop_is_asked_for_one_flush(tmp_path: Path) -> None:
    due: list[Callable[[], None]] = []
    events = FileEventLog(tmp_path, "decode-0", INCARNATION, Log("test"), due.append)
    due.clear()
    events.add("received")
    events.add("ended")
    assert len(due) == 1
    due[0]()
    assert [line["event"] for line in lines_of(tmp_path)] == ["start", "received", "ended"]
    events.close()


def test_a_full_disk_drops_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events = FileEventLog(tmp_path, "decode-0", INCARNATION, Log("test"), clock=lambda: 1.0)
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        events.add("taken", 1)
        events.add("ended", 1)
        events.flush()
    assert events.dropped == 6
    assert caplog.text.count("events were dropped") == 1
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:-5]))
    events.add("torn", 2)
    events.flush()
    assert events.dropped == 7
    monkeypatch.setattr(os, "write", real)
    events.add("whole", 3)
    events.close()
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text().splitlines()[-1])["event"] == "whole"


def test_a_directory_that_cannot_be_made_does_not_stop_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    events = FileEventLog(tmp_path / "file" / "events", "decode-0", INCARNATION, Log("test"))
    events.add("taken")
    events.close()
    assert events.dropped == 2


@pytest.mark.parametrize(("value", "place"), [("auto", "run/events"), ("kept", "kept")])
def test_the_config_says_where(value: str, place: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = tmp_path / "cluster.yaml"
    text = f"model: {{path: m}}\nprocess: {{run_dir: {run}, event_log: {value}}}\n"
    file.write_text(text + "prefill: {nodes: [{name: prefill-0}]}\ndecode: {nodes: [{name: decode-0}]}\n")
    events = event_log(event_directory(load_cluster(file)), "decode-0", INCARNATION, Log("test"))
    events.close()
    assert len(lines_of(tmp_path / place)) == 1


def test_the_event_log_is_off_by_default(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "model: {path: m}\nprefill: {nodes: [{name: prefill-0}]}\ndecode: {nodes: [{name: decode-0}]}\n"
    )
    assert event_log(event_directory(load_cluster(file)), "decode-0", INCARNATION, Log("test")) is NO_EVENTS
