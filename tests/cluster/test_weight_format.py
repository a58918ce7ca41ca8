"""A weight format added by its record: a cluster serves it with exactly the tokens of its eager reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.weight_formats import FORMATS
from common.engine.forward.model_runner import load_model
from router.tokens.tokenizer import Tokenizer
from tests.cluster.harness import MODEL, Client, RunningCluster
from tests.fakes import int8_format
from tests.fakes.eager_reference import greedy_until_a_tie
from tests.fakes.int8_record import METHOD, ROW

pytestmark = pytest.mark.timeout(900)  # two busy cores

TOKENS = 12
# Dense products between quantized ones: each kind has to feed the other.
IGNORED = ("lm_head", "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj")
EAGLE3 = {"algorithm": "eagle3", "draft_model_path": str(MODEL.parent / "tiny-eagle3"), "steps": 3}
CASES: dict[str, dict[str, Any]] = {
    "graphs": {
        "prefill": {"graphs": "breakable", "chunk_tokens": 64},
        "decode": {"graphs": "full", "max_running": 8},
    },
    "piecewise": {"prefill": {"graphs": "piecewise", "chunk_tokens": 64}},
    "eagle3": {"speculation": EAGLE3, "prefill": {"chunk_tokens": 7}, "kv": {"page_size": 4}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("int8") / "model"
    int8_format.write_checkpoint(MODEL, path, IGNORED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, METHOD, ROW)
        yield path


@pytest.fixture(scope="module")
def asked(prompts: list[list[int]]) -> list[list[int]]:
    return prompts[50:80:6]


@pytest.fixture(scope="module")
def expected(model: Path, asked: list[list[int]], tokenizer: Tokenizer) -> list[list[str]]:
    """Return the answers of one process that runs the model eagerly."""
    made = greedy_until_a_tie(load_model(model)[0], asked, TOKENS)
    assert sum(map(len, made)) > 2 * TOKENS
    return [[tokenizer.token_text(token) for token in ids] for ids in made]


@pytest.mark.parametrize("case", CASES)
async def test_an_added_weight_format_is_served(
    case: str, model: Path, asked: list[list[int]], expected: list[list[str]], tmp_path: Path
) -> None:
    config = {**CASES[case], "model": {"path": str(model), "served_name": "tiny"}}
    rows = (("common.checkpoint.weight_formats:FORMATS", f"{METHOD}={ROW}"),)
    async with (
        RunningCluster(tmp_path, config=config, rows=rows) as cluster,
        Client(cluster.url) as client,
    ):
        answers = await client.complete_all(asked, 4, TOKENS)
    assert [answer.tokens[: len(ids)] for answer, ids in zip(answers, expected, strict=True)] == expected
