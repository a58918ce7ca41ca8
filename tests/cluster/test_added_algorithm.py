"""A speculative algorithm added only by its record drafts on real nodes: tests/fakes/echo_algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import load_cluster
from common.errors import ConfigError
from common.speculation import table
from tests.cluster.conftest import Reference
from tests.cluster.harness import Client, RunningCluster
from tests.fakes.echo_algorithm.record import ROWS, echo_rounds

STEPS, LENGTH = 3, 40

pytestmark = pytest.mark.timeout(900)  # two busy cores


async def test_exact_text_and_the_expected_accept_length(
    prompts: list[list[int]], reference: Reference, tmp_path: Path
) -> None:
    """Steps run under graphs and are launched ahead; the text itself determines the number of rounds."""
    chosen = prompts[20:60:4]
    config = {
        "speculation": {"algorithm": "echo", "steps": STEPS},
        "decode": {"graphs": "full", "max_running": 4, "read_results": "one_behind"},
    }
    async with (
        RunningCluster(tmp_path, config=config, rows=ROWS) as cluster,
        Client(cluster.url) as client,
    ):
        answers = await client.complete_all(chosen, 4, LENGTH)
        for prompt, answer in zip(chosen, answers, strict=True):
            assert answer.tokens == reference(prompt, LENGTH, answer.tokens)
        rounds = sum(echo_rounds(reference.ids(prompt, LENGTH + STEPS), LENGTH, STEPS) for prompt in chosen)
        expected = len(chosen) * (LENGTH - 1) / rounds
        assert expected > 1.02, "these answers repeat no token"
        await client.wait_idle()
        (state,) = (await client.info())["internal_states"]
        assert state["avg_spec_accept_length"] == pytest.approx(expected, abs=0.001)
        counters = (await client.node("decode-0"))["counters"]
        assert counters["spec_drafts"] == rounds


def test_the_config_knows_it_by_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("model: {path: m}\nspeculation: {algorithm: echo, steps: 2}\n")
    with pytest.raises(ConfigError, match="Invalid enum value 'echo'"):
        load_cluster(file, environ={})
    monkeypatch.setitem(table.ALGORITHMS, "echo", ROWS[0][1].partition("=")[2])
    assert load_cluster(file, environ={}).cluster.speculation.algorithm == "echo"
    with pytest.raises(ConfigError, match="echo drafts chains; topk must be 1"):
        load_cluster(file, ["speculation.topk=2", "speculation.draft_tokens=3"], {})
    with pytest.raises(ConfigError, match="algorithm echo has no draft model"):
        load_cluster(file, ["speculation.draft_model_path=x"], {})
