"""Timelines record the stages of requests."""

from __future__ import annotations

from router.metrics.timeline import KEPT, Timeline, Timelines


def test_marks_are_kept_in_order() -> None:
    timeline = Timeline("r", 100.0)
    timeline.mark("placed", 100.5)
    timeline.mark("first_token", 102.0)
    timeline.mark("first_token", 103.0)
    timeline.mark("placed", 101.0)
    assert timeline.report() == {
        "request_id": "r",
        "client": "",
        "outcome": "running",
        "nodes": [],
        "stages": {"received": 0.0, "placed": 1.0, "first_token": 2.0},
    }


def test_stages_of_nodes_are_anchored_at_their_own_attempt() -> None:
    timelines = Timelines()
    timeline = Timeline("r", 100.0)
    timelines.add(timeline)
    timelines.open(1, timeline, 101.0, "p", "d")
    timelines.close(1)
    timelines.open(2, timeline, 105.0, "p", "d2")
    timelines.anchor(2, "d2", {"reserved": 0.5})
    timelines.anchor(1, "p", {"queued": 0.25})  # late: the attempt has ended
    stages = timeline.report()["stages"]
    assert stages["decode.reserved"] == 5.5
    assert stages["prefill.queued"] == 1.25
    timelines.anchor(1, "d", {"reserved": 0.75})
    assert timeline.report()["stages"]["decode.reserved"] == 5.5, "the latest attempt's"
    timelines.close(2)
    timelines.anchor(2, "p", {"record_sent": 1.0})
    assert timeline.report()["stages"]["prefill.record_sent"] == 6.0


def test_only_the_nodes_of_a_room_are_heard() -> None:
    timelines = Timelines()
    timeline = Timeline("r", 100.0)
    timelines.open(1, timeline, 100.0, "p", "d")
    timelines.anchor(1, "stranger", {"x": 1.0})
    timelines.anchor(9, "p", {"x": 1.0})
    assert timeline.report()["stages"] == {"received": 0.0}


def test_memory_is_bounded_but_open_rooms_stay() -> None:
    timelines = Timelines()
    first = Timeline("first", 0.0)
    timelines.add(first)
    timelines.open(1, first, 0.0, "p", "d")
    for n in range(2, 2 * KEPT + 2):
        timeline = Timeline(f"r{n}", 0.0)
        timelines.add(timeline)
        timelines.open(n, timeline, 0.0, "p", "d")
        timelines.close(n)
    assert timelines.get("first") is None
    assert timelines.get(f"r{2 * KEPT}") is not None
    assert timelines.rooms == KEPT + 1
    timelines.anchor(1, "d", {"finished": 1.0})
    assert first.stages["decode.finished"] == 1.0
    timelines.close(1)
    timelines.close(1)
    assert timelines.rooms == KEPT


def test_the_latest_requests_of_all_clients_or_of_one() -> None:
    timelines = Timelines()
    for number, client in enumerate(("a", "b", "a", "b")):
        timelines.add(Timeline(f"r{number}", 100.0 + number, client))
    latest = timelines.latest(3, None, 110.0)
    assert [(each["request_id"], each["age"]) for each in latest] == [("r3", 7.0), ("r2", 8.0), ("r1", 9.0)]
    assert [each["request_id"] for each in timelines.latest(3, "a", 110.0)] == ["r2", "r0"]
