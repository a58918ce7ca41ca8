"""Reads the recording of a run: client exchanges, the fault timeline, and the events of every process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.load import Exchange

CLIENTS = "clients.jsonl"
FAULTS = "faults.jsonl"
ANSWERS = "answers.json"
RUN = "run.json"
EVENTS = "events"


@dataclass
class History:
    """Everything that the checker examines."""

    exchanges: list[Exchange]
    faults: list[dict[str, Any]]
    answers: dict[str, dict[str, Any]]  # case -> text, tokens, logprobs, finish_reason
    run: dict[str, Any]  # pairs -> parts, bounds, leaks
    events: list[dict[str, Any]] = field(default_factory=list)  # all processes' events, by time
    torn_lines: int = 0


def write(directory: Path, history: History) -> None:
    _write_lines(directory / CLIENTS, [each.record() for each in history.exchanges])
    _write_lines(directory / FAULTS, history.faults)
    (directory / ANSWERS).write_text(json.dumps(history.answers))
    (directory / RUN).write_text(json.dumps(history.run, indent=1))


def read(directory: Path) -> History:
    """Read a recording. Raises OSError or ValueError if something is missing; torn last lines are counted."""
    history = History(
        [Exchange(**each) for each in _lines(directory / CLIENTS)],
        list(_lines(directory / FAULTS)),
        json.loads((directory / ANSWERS).read_text()),
        json.loads((directory / RUN).read_text()),
    )
    for file in sorted((directory / EVENTS).glob("*.jsonl")):
        for line in file.read_bytes().splitlines():
            try:
                history.events.append({**json.loads(line), "source": file.stem})
            except ValueError:
                history.torn_lines += 1
    history.events.sort(key=lambda event: event["t"])
    return history


def _write_lines(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines():
        yield json.loads(line)
