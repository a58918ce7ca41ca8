"""Speculation through HTTP: the same tokens as plain decoding, and an accept length in /server_info."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from deploy.tiny_models.drafts import files, measure, oracle
from deploy.tiny_models.drafts.features import load_target
from deploy.tiny_models.drafts.reference import load as load_reference
from deploy.tiny_models.prompts import few_shot_prompt
from deploy.tiny_models.word_problems import take
from tests.cluster.conftest import Reference
from tests.cluster.constrained_answers import Questions, expect_constrained
from tests.cluster.graph_metrics import graph_series, replay_share
from tests.cluster.harness import MODEL, Client, RunningCluster
from tests.cluster.masked_reference import MaskedReference
from tests.cluster.state_answers import check_hidden_states
from tests.fakes.mtp_models import first_modules

pytestmark = pytest.mark.timeout(900)  # two busy cores

MODELS = MODEL.parent
LONG_SHOTS = 9  # examples in a prompt of about 650 tokens
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "ngram": ({"speculation": {"algorithm": "ngram", "steps": 4}}, 1.5),
    "ngram-one-behind-page1": (
        {
            "speculation": {"algorithm": "ngram", "steps": 7},
            "kv": {"page_size": 1},
            "decode": {"read_results": "one_behind"},
        },
        1.5,
    ),
    "eagle3": (
        {
            "speculation": {
                "algorithm": "eagle3",
                "draft_model_path": str(MODELS / "tiny-eagle3"),
                "steps": 5,
            }
        },
        4.5,
    ),
    "eagle3-one-behind-page1-chunk7": (
        {
            "speculation": {
                "algorithm": "eagle3",
                "draft_model_path": str(MODELS / "tiny-eagle3"),
                "steps": 3,
            },
            "kv": {"page_size": 1},
            "prefill": {"chunk_tokens": 7},
            "decode": {"read_results": "one_behind"},
            "transfer": {"transport": "tcp"},
        },
        3.0,
    ),
    "eagle": (
        {
            "speculation": {
                "algorithm": "eagle",
                "draft_model_path": str(MODELS / "tiny-eagle"),
                "steps": 5,
            }
        },
        4.5,
    ),
    "eagle-adaptive": (
        {
            "speculation": {
                "algorithm": "eagle",
                "draft_model_path": str(MODELS / "tiny-eagle"),
                "steps": 5,
                "adaptive": "auto",
            }
        },
        1.0,  # how many drafts pay off depends on timing
    ),
    "eagle3-tree-layers": (
        {
            "speculation": {
                "algorithm": "eagle3",
                "draft_model_path": str(MODELS / "tiny-eagle3"),
                "steps": 5,
                "topk": 4,
                "draft_tokens": 16,
            },
            "kv": {"page_size": 4},
            "decode": {"read_results": "one_behind", "graphs": "full", "max_running": 4},
            "transfer": {"layers": True},
            "model": {"return_hidden_states": True},
        },
        4.5,
    ),
    "mtp": (
        {
            "speculation": {
                "algorithm": "mtp",
                "draft_model_path": str(MODELS / "tiny-mtp"),
                "steps": 3,
            }
        },
        3.5,
    ),
    "mtp-one-behind-page1-chunk7-graphs": (
        {
            "speculation": {
                "algorithm": "mtp",
                "draft_model_path": str(MODELS / "tiny-mtp"),
                "steps": 3,
            },
            "kv": {"page_size": 1},
            "prefill": {"chunk_tokens": 7},
            "decode": {"read_results": "one_behind", "graphs": "full", "max_running": 8},
            "transfer": {"transport": "tcp"},
        },
        3.5,
    ),
    "standalone": (
        {
            "speculation": {
                "algorithm": "standalone",
                "draft_model_path": str(MODELS / "tiny-standalone"),
                "steps": 5,
            },
            "decode": {"read_results": "one_behind"},
        },
        3.0,
    ),
}

# Other cases draft in the same way, with more of what can go wrong.
REPEATED = frozenset() if "TANDEM_EXPLORE" in os.environ else {"ngram", "mtp"}


def few_shot_prompts(count: int, shots: int = 3) -> list[list[int]]:
    """Return one prompt of about 650 tokens, and others with this many examples: about 200 tokens for three."""
    encoder = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    prompts = []
    for index in range(count):
        *examples, last = take(shots if index else LONG_SHOTS, 500 + index, "heldout")
        prompts.append(encoder.encode(few_shot_prompt(examples, last.question)).ids)
    return prompts


@pytest.mark.parametrize("name", [name for name in CASES if name not in REPEATED])
async def test_greedy_tokens_and_accept_length(
    name: str, reference: Reference, masked_reference: MaskedReference, tmp_path: Path
) -> None:
    """Tokens, and so the score, are those of transformers, and /server_info shows the accept length (rows B9, B10).

    Rounds run under graphs where they have some (rows E1, E4). Answers under random grammars, greedy and seeded, beside
    free ones, are those of a reference that masks logits and draws; other grammars for each drafter. Hidden states are
    returned where the cluster allows them (row A12).
    """
    config, least = CASES[name]
    # N-grams find drafts in what was said before.
    prompts = few_shot_prompts(5, LONG_SHOTS if name.startswith("ngram") else 3)
    async with RunningCluster(tmp_path, config=config) as cluster:
        async with Client(cluster.url) as client:
            answers = await client.complete_all(prompts, 4, 48)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.tokens == reference(prompt, 48, answer.tokens)
            await client.wait_idle()
            (state,) = (await client.info())["internal_states"]
            assert state["avg_spec_accept_length"] > least, state
            node = await client.node("prefill-0")
            layered = node["counters"]["layered_pages"]
            assert node["config"]["transfer_layers"] is (layered > 0) is name.endswith("-layers")
            assert layered <= node["counters"]["transferred_pages"]
            async with client.session.get("/metrics") as response:
                text = await response.text()
            drafts, accepted = (
                _total(text, f"vllm:spec_decode_num_{what}") for what in ("drafts", "accepted_tokens")
            )
            assert 0 < drafts < accepted + drafts
            if config.get("decode", {}).get("graphs") == "full":
                series = graph_series(text, "decode")
                for phase, model in (("verify", "target"), ("draft_extend", "draft")):
                    assert replay_share(series, phase, model) >= 0.95, series
            if "model" in config:
                await check_hidden_states(client, reference, [prompts[0], [5, 6, 7], *prompts[1:3]], 20)
            print(name, state["avg_spec_accept_length"], drafts, accepted)
            number = 2 * list(CASES).index(name)
            names = [f"schema/{number}", f"schema/{number + 1}", f"text/{number}"]
            await expect_constrained(client, Questions(MODEL).all(names), masked_reference)


async def test_mtp_accepts_as_many_drafts_as_the_oracle(reference: Reference, tmp_path: Path) -> None:
    """Truncating the window costs no draft: there are as many rounds and accepted drafts as the oracle computes.

    The oracle runs the trained modules over the whole text in plain torch (deploy/tiny_models/drafts/oracle.py).
    """
    steps, said = 3, 24
    prompts = few_shot_prompts(4)
    _, head = files.load_head(MODELS / "tiny-mtp")
    target = load_target()
    rounds: list[oracle.Round] = []
    for prompt in prompts:
        ids = torch.tensor(prompt + reference.ids(prompt, said + steps))  # the last round may go past the end
        proposed = measure.proposals(head, target, ids[None], steps)[0]
        walked = oracle.walk(oracle.ok_matrix(proposed, ids), len(prompt))
        rounds += [each for each in walked if each.at + 2 - len(prompt) < said]
    speculation = {"algorithm": "mtp", "draft_model_path": str(MODELS / "tiny-mtp"), "steps": steps}
    config = {"speculation": speculation, "prefill": {"chunk_tokens": 33}}
    async with RunningCluster(tmp_path, config=config) as cluster, Client(cluster.url) as client:
        await client.complete_all(prompts, 2, said)
        await client.wait_idle()
        async with client.session.get("/metrics") as response:
            text = await response.text()
    accepted = sum(each.accepted for each in rounds)
    assert _total(text, "vllm:spec_decode_num_drafts") == len(rounds)
    assert _total(text, "vllm:spec_decode_num_accepted_tokens") == accepted > 2.5 * len(rounds)


async def test_one_mtp_module_accepts_what_the_reference_says(reference: Reference, tmp_path: Path) -> None:
    """One module drafts four steps: rounds and accepted drafts equal those of a loop in plain torch without a cache."""
    steps, said = 4, 12
    path = first_modules(tmp_path / "one-module", 1)
    draft = load_reference(path, load_target())
    _, *prompts = few_shot_prompts(4)  # the loop reads the whole text for each draft, so not the long one
    rounds = accepted = 0
    for prompt in prompts:
        ids, known = prompt + reference.ids(prompt, said + steps), len(prompt) + 1
        while known - len(prompt) < said:
            proposed, right = draft.propose(ids[:known], steps), 0
            while right < steps and proposed[right] == ids[known + right]:
                right += 1
            rounds, accepted, known = rounds + 1, accepted + right, known + right + 1
    speculation = {"algorithm": "mtp", "draft_model_path": str(path), "steps": steps}
    config = {
        "speculation": speculation,
        "prefill": {"chunk_tokens": 33},
        "decode": {"read_results": "one_behind"},
    }
    async with RunningCluster(tmp_path, config=config) as cluster, Client(cluster.url) as client:
        answers = await client.complete_all(prompts, 2, said)
        assert [answer.tokens for answer in answers] == [reference(prompt, said) for prompt in prompts]
        await client.wait_idle()
        async with client.session.get("/metrics") as response:
            text = await response.text()
    assert _total(text, "vllm:spec_decode_num_drafts") == rounds
    assert _total(text, "vllm:spec_decode_num_accepted_tokens") == accepted > rounds


def _total(text: str, series: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{series}_total"))
