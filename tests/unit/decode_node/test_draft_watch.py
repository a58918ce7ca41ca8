"""A draft that is almost never right is warned about once, and only after enough observations."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.checkpoint.aux_layers import AuxLayers
from common.checkpoint.draft_config import DraftConfig
from common.observability.logs import Log
from decode_node import draft_watch
from decode_node.accept_counters import AcceptCounters
from decode_node.draft_watch import ENOUGH, MIN_ACCEPTED, FirstDraftWatch, causes_of
from tests.fakes.drafters import ngram
from tests.fakes.mtp_models import FORMAT
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.scenarios import prompt_of
from tests.fakes.tiny_model import CONFIG

EVENT = "the first draft of a round is almost never accepted"


def counted(rounds: int, accepted: int) -> AcceptCounters:
    counters = AcceptCounters()
    counters.drafts, counters.accepted_at = rounds, [accepted] * bool(accepted)
    return counters


def warnings(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [record.fields for record in caplog.records if record.message == EVENT]  # type: ignore[attr-defined]


def test_too_few_accepted_first_drafts_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong convention of aux layers shows as low acceptance at position 0."""
    watch = FirstDraftWatch("such causes", Log("test"))
    watch.check(counted(ENOUGH - 1, 0))  # a short load says nothing
    assert not warnings(caplog)
    for rounds in (ENOUGH, ENOUGH + 1):
        watch.check(counted(rounds, 10))
    (said,) = warnings(caplog)
    assert (said["rounds"], said["accepted"], said["causes"]) == (ENOUGH, 10, "such causes")


def test_a_draft_that_is_often_right_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    watch = FirstDraftWatch("", Log("test"))
    watch.check(counted(ENOUGH, int(MIN_ACCEPTED * ENOUGH)))
    assert not warnings(caplog)
    watch.check(counted(2 * ENOUGH, 0))  # no draft was ever accepted, so no position has been counted
    assert len(warnings(caplog)) == 1


def test_the_causes_name_the_remedy() -> None:
    path = Path("/models/head")
    eagle3 = DraftConfig("eagle3", CONFIG, 64, AuxLayers((2, 4, 7), "boundary", "guessed"), None, False)
    causes = causes_of(path, eagle3)
    assert "layers 2, 4, 7 (boundaries, guessed)" in causes
    assert "aux_layer_convention: boundary or output" in causes
    assert "/models/head/config.json" in causes
    assert "head was trained for another model" in causes
    assert "aux" not in causes_of(path, DraftConfig("eagle", CONFIG, 64, AuxLayers(), None, False))
    # The form of the modules settles which stream they read.
    modules = DraftConfig("mtp", CONFIG, 64, AuxLayers((8,)), None, False, mtp=FORMAT)
    assert "layers 8" not in causes_of(path, modules)


def test_a_node_shows_its_counters_to_the_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(draft_watch, "ENOUGH", 2)
    monkeypatch.setattr(draft_watch, "MIN_ACCEPTED", 1.5)
    shape = Shape(step=ngram(3), page_size=4, watch=FirstDraftWatch("x", Log("test")))
    with NodeCluster(shape) as cluster:
        cluster.submit(prompt_of(7), 20)
        cluster.run()
    assert len(warnings(caplog)) == 1
