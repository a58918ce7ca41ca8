"""The tiny model of Qwen3.5's form as deploy/clusters/local-hybrid.yaml serves it: experts, gated delta layers, MTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tokenizers
import torch

from common.checkpoint.model_config import ModelConfig
from deploy.tiny_models.drafts import measure, oracle
from deploy.tiny_models.language_model import LanguageModel
from deploy.tiny_models.mixture import checkpoint
from deploy.tiny_models.mixture.mtp_head import MtpHead
from deploy.tiny_models.mixture.shapes import FAMILIES
from router.tokens.tokenizer import Tokenizer
from tests.cluster.check_families import generated, shipped
from tests.cluster.constrained_answers import Questions, expect_constrained
from tests.cluster.harness import ROOT, Client, RunningCluster
from tests.cluster.masked_reference import MaskedReference

pytestmark = pytest.mark.timeout(900)  # two busy cores

MODEL = ROOT / "deploy" / "tiny_models" / "tiny-hybrid"
STEPS = 3
SAID = 24  # tokens per answer
BORDER = 64  # tokens at whose multiples states are saved
# Four layers: three inputs of 512 channels, and a matrix for each of 8 heads, in float32.
STATE_BYTES = 4 * 4 * (3 * 512 + 8 * 32 * 32)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path_factory.mktemp("hybrid"), config=shipped("hybrid")) as running:
        yield running


@pytest.fixture(scope="module")
def trained() -> tuple[LanguageModel, MtpHead]:
    """Return the model in transformers and the module in plain torch, in float32."""
    model, module = checkpoint.load(MODEL, FAMILIES["hybrid"])
    assert module is not None
    return model, module


async def counters(client: Client) -> dict[str, int]:
    """Return the counters of the decode node once it is idle."""
    await client.wait_idle()
    found: dict[str, int] = (await client.node("decode-0"))["counters"]
    return found


async def test_tokens_and_accepted_drafts_equal_the_reference(
    hybrid: RunningCluster, trained: tuple[LanguageModel, MtpHead]
) -> None:
    """The text of transformers, in as many rounds with as many accepted drafts as in one process in plain torch.

    The second time, prompts continue from the last state that was saved for them, with the same results, and the decode
    node still has their whole pages.
    """
    model, module = trained
    encoder = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    texts = [text for suite in measure.suites(2) for text in suite.prompts]
    prompts = [encoder.encode(text, add_special_tokens=False).ids for text in texts]
    # The last round may go past the end.
    expected = [generated(model, prompt, SAID + STEPS) for prompt in prompts]
    rounds: list[oracle.Round] = []
    for prompt, answer in zip(prompts, expected, strict=True):
        ids = torch.tensor(prompt + answer)
        proposed = measure.proposals(module, model, ids[None], STEPS)[0]
        walked = oracle.walk(oracle.ok_matrix(proposed, ids), len(prompt))
        rounds += [each for each in walked if each.at + 2 - len(prompt) < SAID]
    names = Tokenizer(MODEL)
    async with Client(hybrid.url) as client:
        for reused in (False, True):
            before = await counters(client)
            answers = await client.complete_all(prompts, 4, SAID)
            after = await counters(client)
            for prompt, wanted, found in zip(prompts, expected, answers, strict=True):
                assert found.tokens == [names.token_text(token) for token in wanted[:SAID]]
                cached = (len(prompt) - 1) // BORDER * BORDER if reused else 0
                assert found.usage["prompt_tokens_details"]["cached_tokens"] == cached
            drafts, accepted = (
                after[name] - before[name] for name in ("spec_drafts", "spec_accepted_tokens")
            )
            assert drafts == len(rounds)
            assert accepted == sum(each.accepted for each in rounds) > 1.5 * len(rounds)
            sent = after["transferred_pages"] - before["transferred_pages"]
            assert (sent == len(prompts)) is reused, "only the last page of each prompt"
        config = (await client.node("prefill-0"))["config"]
    assert config["prefix_cache"].startswith("on:")
    assert config["state_snapshot_bytes"] == config["state_snapshots"] * STATE_BYTES > 0
    phases = {name: config[name] for name in config if name.startswith("start_") and name.endswith("_s")}
    total = phases.pop("start_s")
    assert "start_loading_s" in phases
    assert sum(phases.values()) == pytest.approx(total, abs=0.01 * (len(phases) + 1))  # each is rounded


async def test_constrained_answers_equal_the_reference(
    hybrid: RunningCluster, trained: tuple[LanguageModel, MtpHead]
) -> None:
    """Random grammars, greedy and seeded, beside free answers; a mask for every node that the module drafts."""
    reference = MaskedReference(trained[0], MODEL, ModelConfig.load(MODEL))
    async with Client(hybrid.url) as client:
        asked = Questions(MODEL).all(["schema/40", "schema/41", "schema/42", "text/40"])
        await expect_constrained(client, asked, reference)
