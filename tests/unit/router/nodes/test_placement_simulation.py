"""The simulator of placement: its traces have the stated statistics, and its clock needs no time."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.load_generator.trace import read_trace
from tests.bench.placement_simulation import Setup, simulate
from tests.bench.placement_traces import AGENTS, CONVERSATION, main, statistics, trace


def test_a_conversation_trace_has_the_published_statistics() -> None:
    found = statistics(list(trace(CONVERSATION, CONVERSATION.rate, 3540, 1)))
    assert found["requests"] == pytest.approx(12_031, rel=0.05)
    assert found["input_mean"] == pytest.approx(12_035, rel=0.1)
    assert found["input_p50"] == pytest.approx(6909, rel=0.1)
    assert found["input_p90"] == pytest.approx(27_367, rel=0.1)
    assert found["input_p99"] == pytest.approx(85_401, rel=0.2)
    assert found["output_mean"] == pytest.approx(343, rel=0.05)
    assert found["ideal_hit_rate"] == pytest.approx(0.37, abs=0.04)


def test_an_agent_trace_has_the_published_lengths() -> None:
    found = statistics(list(trace(AGENTS, AGENTS.rate, 1770, 1)))
    assert found["requests"] == pytest.approx(11_804, rel=0.05)
    assert found["input_mean"] == pytest.approx(8596, rel=0.05)
    assert found["output_mean"] == pytest.approx(182, rel=0.05)
    assert found["ideal_hit_rate"] == pytest.approx(0.62, abs=0.04)


def test_a_trace_that_was_written_can_be_replayed(tmp_path: Path) -> None:
    main(["agents", str(tmp_path / "trace.jsonl"), "--seconds", "20", "--seed", "2"])
    read = list(read_trace(tmp_path / "trace.jsonl"))
    drawn = list(trace(AGENTS, AGENTS.rate, 20.0, 2))
    assert len(read) > 50
    assert [(each.timestamp, each.hash_ids) for each in read] == [
        (each.timestamp, each.hash_ids) for each in drawn
    ]


def test_requests_that_share_prefixes_meet_on_their_nodes() -> None:
    requests = list(trace(AGENTS, AGENTS.rate * 4, 30.0, 1))
    unaware, aware = (simulate(requests, 8, policy) for policy in ("least_loaded", "cache_aware"))
    assert aware["hit_rate"] > unaware["hit_rate"] + 0.05
    assert aware["first_token_p50"] < unaware["first_token_p50"]
    assert aware["known_blocks"] > 0
    assert simulate(requests, 8, "cache_aware") == aware, "it is deterministic"
    assert simulate(requests, 8, "cache_events")["hit_rate"] > unaware["hit_rate"] + 0.05


def test_routers_that_nodes_tell_what_they_hold_find_more_than_routers_that_guess() -> None:
    requests = list(trace(AGENTS, AGENTS.rate * 4, 15.0, 1))
    guessed, told = (
        simulate(requests, 8, policy, Setup(routers=4)) for policy in ("cache_aware", "cache_events")
    )
    assert told["hit_rate"] > guessed["hit_rate"] + 0.05
    assert told["first_token_p50"] < guessed["first_token_p50"]


def test_sessions_and_draws_reach_the_placement() -> None:
    requests = list(trace(AGENTS, AGENTS.rate * 4, 15.0, 1))
    plain = simulate(requests, 8, "least_loaded")
    sessions = simulate(requests, 8, "least_loaded", Setup(sessions=True))
    assert sessions["hit_rate"] > plain["hit_rate"] + 0.05, "further turns find what the earlier ones left"
    drawn = simulate(requests, 8, "least_loaded", Setup(temperature_ms=1000.0))
    assert drawn["first_token_p90"] > plain["first_token_p90"], "loads hardly count"
