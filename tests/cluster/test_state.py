"""A model with a latent plane and a per-request plane, added by rows, on real processes with pages over TCP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from common.checkpoint.families import FAMILIES
from common.checkpoint.model_config import ModelConfig
from common.kv_cache.layer_kinds import MIXERS
from common.named import named
from router.tokens.tokenizer import Tokenizer
from tests.cluster.harness import MODEL, Client, RunningCluster
from tests.cluster.retracted_answers import complete_until_retracted
from tests.fakes.toy_state.checkpoint import write_checkpoint
from tests.fakes.toy_state.record import ARCHITECTURE, ROWS
from tests.fakes.toy_state.reference import continuation

pytestmark = pytest.mark.timeout(900)  # two busy cores

TOKENS = 100
SMALL_POOL = {"pool_tokens": 12 * 16, "reserved_tokens": 0}
SPECULATION = {"algorithm": "ngram", "steps": 3}
CASES: dict[str, dict[str, Any]] = {
    "graphs": {
        "prefill": {"graphs": "breakable", "chunk_tokens": 25},
        "decode": {"graphs": "full", "max_running": 4, "read_results": "one_behind"},
        "speculation": SPECULATION,
    },
    # 12 pages: enough for one request of 60 and 100 tokens, and the prompts of 8 requests do not even fit
    "retraction": {
        "decode": SMALL_POOL,
        "speculation": SPECULATION,
    },
    "plain": {"decode": SMALL_POOL},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    path = tmp_path_factory.mktemp("toy") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, ARCHITECTURE, named(ROWS[0][1].partition("=")[2]))
        for _, row in ROWS[1:]:
            name, _, record = row.partition("=")
            patch.setitem(MIXERS, name, record)
        tensors = write_checkpoint(MODEL, path, ("latent", "recurrent", "latent", "recurrent"))
        yield path, tensors


@pytest.mark.parametrize("case", CASES)
async def test_a_model_with_request_state_is_served(
    case: str,
    model: tuple[Path, dict[str, Tensor]],
    prompts: list[list[int]],
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    """Greedy output equals the reference, which keeps no cache; drafts are accepted and requests are retracted."""
    path, tensors = model
    asked = [prompt[:60] for prompt in prompts[8:72:48]] * 4
    section = CASES[case]
    config = {
        **section,
        "model": {"path": str(path), "served_name": "tiny"},
        "transfer": {"transport": "tcp"},
    }
    async with (
        RunningCluster(tmp_path, config=config, rows=ROWS) as cluster,
        Client(cluster.url) as client,
    ):
        if "pool_tokens" in section["decode"]:
            answers, rounds, counters = await complete_until_retracted(client, asked, TOKENS)
        else:
            answers, rounds = await client.complete_all(asked, 8, TOKENS), 1
            await client.wait_idle()
            counters = (await client.node("decode-0"))["counters"]
    toy = ModelConfig.load(path)
    expected = [continuation(tensors, toy, prompt, TOKENS) for prompt in asked[:2]] * 4 * rounds
    texts = [[tokenizer.token_text(token) for token in ids] for ids in expected]
    assert [answer.tokens for answer in answers] == texts
    assert counters["transfers"] == rounds * len(asked) + counters["transfer_failures"]
    if "speculation" in section:
        assert counters["spec_accepted_tokens"] > TOKENS
    if "pool_tokens" in section["decode"]:
        assert counters["retractions"] > 0
