"""The report says when a run made too few faults of a kind, or missed a station."""

from __future__ import annotations

from tests.chaos.report import EVERY_STATION, summary, too_few
from tests.chaos.test_check import fault, good


def test_too_few_faults_are_reported() -> None:
    recorded = good()
    recorded.run["minimums"] = {"kill": 2, "stop": 1, "link": 0}
    recorded.faults = fault(10.055, 11.0, "prefill-0", "kill") + fault(10.22, 11.0, "decode-0", "stop")
    assert too_few(recorded) == ["1 faults of kind kill, at least 2 were due"]
    recorded.run["minimums"] = {"kill": 1, "stop": 1, "link": 0}
    assert too_few(recorded) == []


def test_stations_that_no_fault_hit_are_reported() -> None:
    recorded = good()
    recorded.run["minimums"] = {"stop": EVERY_STATION}
    recorded.faults = [note for _ in range(EVERY_STATION) for note in fault(10.22, 11.0, "decode-0", "stop")]
    assert too_few(recorded) == [
        f"no stop hit a request at the station {station}"
        for station in ("queued", "computing", "transfer", "accepted", "finished")
    ]


def test_the_summary_counts() -> None:
    recorded = good()
    recorded.run |= {"seed": 1, "setup": {}, "begun": 10.0, "ended": 20.0, "detections": [], "restarts": []}
    recorded.faults = fault(10.22, 11.0, "decode-0", "stop")
    found = summary(recorded, [])
    assert (found["faults"], found["requests"], found["complete"]) == (1, 1, 1)
    assert found["stations_by_kind"] == {"stop": {"streaming": 1}}
