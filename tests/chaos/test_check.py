"""The checker finds every kind of broken history and nothing in a good one. No process is started here."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import check, history, recovery_rules
from tests.chaos.history import History
from tests.chaos.load import Exchange

TOKENS = ["a", "b", "c", "d", "e", "f", "g", "h"]
IDS = [11, 12, 13, 14, 15, 16, 17, 18]
ROUTER, PREFILL, DECODE = "aa" * 16, "bb" * 16, "cc" * 16
PARTS = ["router", "prefill-0", "decode-0", "router-prefill-0"]
ROOM = 77


def exchange(**fields: Any) -> Exchange:
    """A complete streamed answer, one token each 0.1 s from t = 10."""
    made = Exchange("r", "case", True, "stays", sent=10.0)
    made.status, made.done, made.finishes, made.finish_reason = 200, True, 1, "length"
    made.tokens, made.text, made.logprobs = list(TOKENS), "".join(TOKENS), [-0.5] * 8
    made.progress, made.ended = [10.1 + i / 10 for i in range(8)], 10.9
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def events() -> list[dict[str, Any]]:
    """One request over one pair, as the three processes record it."""

    def of(source: str, t: float, event: str, room: int = 0, **fields: Any) -> dict[str, Any]:
        return {"source": source, "t": t, "event": event, "room": room, **fields}

    return [
        of("r", 1.0, "start", node="router", incarnation=ROUTER, pid=1),
        of("p", 1.0, "start", node="prefill-0", incarnation=PREFILL, pid=2),
        of("d", 1.0, "start", node="decode-0", incarnation=DECODE, pid=3),
        of("r", 10.01, "received", request="r", prompt=20),
        of("r", 10.02, "placed", ROOM, request="r", tokens=20, prefill=PREFILL, decode=DECODE),
        of("p", 10.03, "taken", ROOM, request="r", decode=DECODE),
        of("d", 10.03, "taken", ROOM, request="r", prefill=PREFILL),
        of("d", 10.04, "opened", ROOM, generation=1, pages=[5, 6], held=[]),
        of("p", 10.04, "leased", ROOM, pages=[1, 2], cached=0),
        of("p", 10.05, "chunk", ROOM, start=0, length=20),
        of("p", 10.06, "first_token", ROOM, id=11),
        of("p", 10.06, "posted", ROOM, generation=1, pages=[1, 2]),
        of("p", 10.07, "record_posted", ROOM, generation=1),
        of("r", 10.07, "delivered", request="r", offset=0, ids=[11]),
        of("d", 10.08, "accepted", ROOM, id=11),
        of("p", 10.09, "settled", ROOM, delivered=True),
        of("p", 10.09, "released", ROOM),
        of("d", 10.2, "tokens", ROOM, offset=1, ids=IDS[1:5], finish=None),
        of("r", 10.2, "delivered", request="r", offset=1, ids=IDS[1:5]),
        of("d", 10.25, "grown", ROOM, pages=[7]),
        of("d", 10.3, "tokens", ROOM, offset=5, ids=IDS[5:], finish="length"),
        of("d", 10.3, "freed", ROOM),
        of("r", 10.3, "delivered", request="r", offset=5, ids=IDS[5:]),
        of("r", 10.31, "ended", request="r", outcome="length", tokens=8),
    ]


def good() -> History:
    answers = {
        "case": {"text": "".join(TOKENS), "tokens": TOKENS, "logprobs": [-0.5] * 8, "finish_reason": "length"}
    }
    run = {"pairs": {"prefill-0/decode-0": PARTS}, "leaks": [], "not_recovered": [], "orderly": [1, 2, 3]}
    return History([exchange()], [], answers, run, events())


def fault(since: float, until: float, part: str, kind: str = "stop") -> list[dict[str, Any]]:
    return [
        {"t": since, "event": "begin", "fault": "f", "parts": [part], "kind": kind, "target": part},
        {"t": until, "event": "end", "fault": "f"},
    ]


def found(recorded: History) -> list[str]:
    return [each.invariant for each in check.check(recorded)]


def test_a_good_history_is_clean() -> None:
    assert check.check(good()) == []


BROKEN_ANSWERS: list[tuple[str, str, dict[str, Any]]] = [
    ("another token", "I1", {"tokens": [*TOKENS[:4], "x", *TOKENS[5:]]}),
    ("a token is missing", "I2", {"tokens": [*TOKENS[:3], *TOKENS[4:]]}),
    ("a token is repeated", "I2", {"tokens": [*TOKENS[:4], *TOKENS[3:]]}),
    ("complete but short", "I1", {"tokens": TOKENS[:5], "text": "abcde", "logprobs": [-0.5] * 5}),
    ("another text", "I1", {"text": "abcdefgx"}),
    ("another logprob", "I1", {"logprobs": [-0.5] * 4 + [-0.7] * 4}),
    ("a shorter answer than was asked for", "I1", {"limit": 6, "tokens": TOKENS[:5], "text": "abcde"}),
    ("another finish_reason", "I1", {"finish_reason": "stop"}),
    ("two finishes", "I3", {"finishes": 2}),
    ("events after [DONE]", "I3", {"after_done": 1}),
    ("an error and an answer, at no fault", "I3 I6", {"error_code": "node_lost"}),
    ("no terminal event", "I3", {"done": False, "broken": "ClientPayloadError"}),
    (
        "wrong tokens before an error, at no fault",
        "I1 I6",
        {"tokens": ["x"], "done": False, "error_code": "node_lost"},
    ),
    ("a pause of 8 s", "I4", {"progress": [10.1, 18.2], "ended": 18.3}),
    ("no answer for 8 s", "I4", {"progress": [], "ended": 18.3}),
]


@pytest.mark.parametrize(
    ("invariants", "fields"), [each[1:] for each in BROKEN_ANSWERS], ids=[each[0] for each in BROKEN_ANSWERS]
)
def test_broken_answers_are_found(invariants: str, fields: dict[str, Any]) -> None:
    recorded = good()
    recorded.exchanges = [exchange(**fields)]
    recorded.events = []
    assert found(recorded) == invariants.split()


ALLOWED: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    (
        "a clean beginning and an error",
        {"tokens": TOKENS[:3], "text": "abc", "done": False, "error_code": "x"},
        fault(9.9, 10.2, "decode-0"),
    ),
    (
        "an answer as short as was asked for",
        {"limit": 5, "tokens": TOKENS[:5], "text": "abcd\ufffd", "logprobs": [-0.5] * 5},
        [],
    ),
    ("a client that left", {"tokens": TOKENS[:3], "text": "abc", "done": False, "left": True}, []),
    ("a router that died", {"done": False, "broken": "reset"}, fault(10.2, 11.0, "router", "kill")),
    ("a logprob within rounding", {"logprobs": [-0.5001] * 8}, []),
    (
        "a pause while no pair was healthy",
        {"progress": [10.1, 18.2], "ended": 18.3},
        fault(11.0, 16.0, "decode-0"),
    ),
    (
        "an error after a fault",
        {"tokens": TOKENS[:3], "text": "abc", "done": False, "error_code": "node_lost"},
        fault(8.0, 9.0, "decode-0", "kill"),
    ),
    (
        "a machine that ran nothing",
        {"progress": [10.1, 18.2], "ended": 18.3},
        [{"t": 18.0, "event": "starved", "since": 10.0, "until": 18.0, "seconds": 6.0}],
    ),
]


@pytest.mark.parametrize(
    ("fields", "faults"), [each[1:] for each in ALLOWED], ids=[each[0] for each in ALLOWED]
)
def test_what_faults_explain_is_no_violation(fields: dict[str, Any], faults: list[dict[str, Any]]) -> None:
    recorded = good()
    recorded.exchanges, recorded.faults, recorded.events = [exchange(**fields)], faults, []
    assert found(recorded) == []


def test_a_fault_elsewhere_explains_no_hang() -> None:
    recorded = good()
    recorded.exchanges = [exchange(progress=[10.1, 18.2], ended=18.3)]
    recorded.run["pairs"]["prefill-1/decode-0"] = ["router", "prefill-1", "decode-0"]
    recorded.faults = fault(10.0, 18.0, "prefill-0")
    recorded.events = []
    assert found(recorded) == ["I4"]


@pytest.mark.parametrize(
    ("faults", "invariants"),
    [
        ([], ["I6"]),
        (fault(10.5, 10.6, "decode-1"), ["I6"]),
        (fault(1.0, 2.0, "decode-0"), ["I6"]),
        (fault(10.5, 10.6, "decode-0"), []),
    ],
    ids=["no fault", "a fault elsewhere", "a fault long ago", "a fault of its pair"],
)
def test_an_error_needs_a_fault(faults: list[dict[str, Any]], invariants: list[str]) -> None:
    recorded = good()
    recorded.exchanges = [exchange(tokens=TOKENS[:3], text="abc", done=False, error_code="node_lost")]
    recorded.run["pairs"]["prefill-1/decode-1"] = ["router", "prefill-1", "decode-1"]
    recorded.faults = faults
    assert found(recorded) == invariants


def drop(event: str, nth: int = 0) -> Callable[[list[dict[str, Any]]], None]:
    def apply(recorded: list[dict[str, Any]]) -> None:
        recorded.remove([each for each in recorded if each["event"] == event][nth])

    return apply


def change(event: str, nth: int = 0, **fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    def apply(recorded: list[dict[str, Any]]) -> None:
        [each for each in recorded if each["event"] == event][nth].update(fields)

    return apply


def repeat(event: str) -> Callable[[list[dict[str, Any]]], None]:
    def apply(recorded: list[dict[str, Any]]) -> None:
        first = next(each for each in recorded if each["event"] == event)
        recorded.insert(recorded.index(first) + 1, deepcopy(first))

    return apply


def insert(
    after: str, source: str, event: str, room: int = 99, **fields: Any
) -> Callable[[list[dict[str, Any]]], None]:
    def apply(recorded: list[dict[str, Any]]) -> None:
        at = [each["event"] for each in recorded].index(after) + 1
        t = recorded[at - 1]["t"]
        recorded.insert(at, {"source": source, "t": t, "event": event, "room": room, **fields})

    return apply


BROKEN_EVENTS: list[tuple[str, str, Callable[[list[dict[str, Any]]], None]]] = [
    ("the router invents a token", "I1", change("delivered", 1, ids=[12, 99, 14, 15])),
    ("the router delivers with a gap", "I2", change("delivered", 2, offset=6, ids=IDS[6:])),
    ("the router delivers twice", "I2", repeat("delivered")),
    ("a request ends twice", "I3", repeat("ended")),
    ("a request never ends", "I3", drop("ended")),
    ("a request is received twice", "I3", repeat("received")),
    ("a decode node leaves tokens out", "I2", change("tokens", 1, offset=6, ids=IDS[6:])),
    ("a decode node repeats tokens", "I2", repeat("tokens")),
    ("tokens without a record", "I2", drop("accepted")),
    ("a record is accepted twice", "I2", repeat("accepted")),
    ("a page of two decode rooms", "I8", insert("opened", "d", "opened", generation=2, pages=[6], held=[])),
    (
        "a page is read while it is written",
        "I8",
        insert("opened", "d", "opened", generation=2, pages=[], held=[5]),
    ),
    ("a generation is used twice", "I8", insert("accepted", "d", "opened", generation=1, pages=[], held=[])),
    ("pages are freed while they can be written", "I8", insert("opened", "d", "freed", ROOM)),
    ("a page of two prefill rooms", "I8", insert("leased", "p", "leased", pages=[2], cached=0)),
    ("pages without a lease are sent", "I8", insert("leased", "p", "posted", generation=1, pages=[])),
    ("pages of another generation are sent", "I8", change("posted", generation=9)),
    ("a record of pages that were not sent", "I8", change("posted", pages=[1])),
    ("a room that was placed elsewhere", "I8", change("placed", decode="dd" * 16)),
    ("prefill pages are kept", "I5", drop("released")),
    ("decode pages are kept", "I5", drop("freed")),
]


@pytest.mark.parametrize(
    ("invariant", "breaks"), [each[1:] for each in BROKEN_EVENTS], ids=[each[0] for each in BROKEN_EVENTS]
)
def test_broken_events_are_found(invariant: str, breaks: Callable[[list[dict[str, Any]]], None]) -> None:
    recorded = good()
    breaks(recorded.events)
    assert invariant in found(recorded)


def test_what_a_killed_process_did_not_write_is_no_violation() -> None:
    """SIGKILL loses the last events, and what the process held."""
    recorded = good()
    recorded.run["orderly"] = []
    for event in ("released", "freed", "ended"):
        drop(event)(recorded.events)
    assert found(recorded) == []


@pytest.mark.parametrize(("key", "invariant"), [("leaks", "I5"), ("not_recovered", "I7")])
def test_what_the_run_measured_counts(key: str, invariant: str) -> None:
    recorded = good()
    recorded.run[key] = ["decode-0 has 90 open descriptors, 40 before the first fault"]
    assert found(recorded) == [invariant]


BATCHES: list[tuple[str, list[tuple[float, float, int]], list[str]]] = [
    ("as fast as before", [(21.0, 26.0, 1000)], []),
    ("as fast at the second try", [(21.0, 31.0, 1000), (31.0, 36.2, 1000)], []),
    ("slower", [(21.0, 27.0, 1000), (27.0, 33.0, 1000)], ["I7"]),
    ("too late", [(21.0, 27.0, 1000), (20.0 + recovery_rules.WITHIN + 1, 86.0, 1000)], ["I7"]),
]


@pytest.mark.parametrize(
    ("after", "invariants"), [each[1:] for each in BATCHES], ids=[each[0] for each in BATCHES]
)
def test_throughput_has_to_recover(after: list[tuple[float, float, int]], invariants: list[str]) -> None:
    recorded = good()
    recorded.run |= {"ended": 20.0, "batches_after": after}
    recorded.run["batches_before"] = [(0.0, 5.0, 1000), (5.0, 9.0, 1000), (9.0, 14.0, 1000)]
    assert found(recorded) == invariants


def test_time_without_a_processor_is_not_lost_throughput() -> None:
    recorded = good()
    recorded.run |= {"ended": 20.0, "batches_after": [(21.0, 27.0, 1000)]}
    recorded.run["batches_before"] = [(0.0, 5.0, 1000)]
    recorded.faults = [{"t": 24.0, "event": "starved", "since": 22.0, "until": 24.0, "seconds": 1.0}]
    assert found(recorded) == []


def streamed(first: float, gap: float, count: int = 300) -> Exchange:
    """A long answer; only its times matter."""
    times = [first + gap * i for i in range(count)]
    return exchange(sent=first - 0.1, progress=times, ended=times[-1])


@pytest.mark.parametrize(
    ("gap", "faults", "invariants"),
    [
        (0.02, [], []),
        (0.5, [], ["I6"]),
        (0.5, fault(30.0, 200.0, "decode-0"), []),
        (0.5, fault(30.0, 200.0, "decode-9"), ["I6"]),
    ],
    ids=["as before", "slower", "its node was impaired", "another node was impaired"],
)
def test_tokens_unaffected_by_faults_arrive_as_fast_as_before(
    gap: float, faults: list[dict[str, Any]], invariants: list[str]
) -> None:
    recorded = good()
    recorded.run["begun"] = 30.0
    recorded.exchanges = [streamed(10.0, 0.02), streamed(40.0, gap)]
    recorded.faults, recorded.events = faults, []
    assert found(recorded) == invariants


def test_the_command_reads_what_a_run_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = good()
    history.write(tmp_path, recorded)
    (tmp_path / "events").mkdir()
    for source in "rpd":
        lines = [json.dumps(each) for each in recorded.events if each["source"] == source]
        (tmp_path / "events" / f"{source}.jsonl").write_text("\n".join(lines) + '\n{"t": 99, "eve')
    assert check.main([str(tmp_path)]) == 0
    assert "clean: 1 requests" in capsys.readouterr().out
    recorded.exchanges[0].tokens[2] = "x"
    history.write(tmp_path, recorded)
    assert check.main([str(tmp_path)]) == 1
    assert "I1: r (case): token 2 of 8" in capsys.readouterr().out


def test_the_command_refuses_an_incomplete_directory(tmp_path: Path) -> None:
    assert check.main([str(tmp_path)]) == 2
    assert check.main([]) == 2
