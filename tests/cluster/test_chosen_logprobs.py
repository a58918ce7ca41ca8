"""Log-probabilities of named tokens over HTTP, with drafts in trees: the log-softmax of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cluster.harness import MODEL, Client, RunningCluster
from tests.cluster.test_sampling_parameters import TREES

pytestmark = pytest.mark.timeout(900)

IDS = [5, 700, 311, 42]


async def test_they_are_those_of_the_raw_logits(tmp_path: Path, prompts: list[list[int]]) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    async with RunningCluster(tmp_path, config=TREES) as cluster, Client(cluster.url) as client:
        for prompt in (prompts[20], prompts[70]):
            sampling = {"temperature": 0.8, "sampling_seed": 5, "max_new_tokens": 20}
            body = {"input_ids": prompt, "return_logprob": True, "token_ids_logprob": IDS}
            async with client.session.post(
                "/generate", json=body | {"sampling_params": sampling}
            ) as response:
                answer = await response.json()
                assert response.status == 200, answer
            ids, meta = answer["output_ids"], answer["meta_info"]
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[:, IDS].tolist()
            assert len(expected) == len(meta["output_token_ids_logprobs"]) == 20
            for found, wanted in zip(meta["output_token_ids_logprobs"], expected):
                assert [each for _, each, _ in found] == IDS
                assert [value for value, _, _ in found] == pytest.approx(wanted, abs=1e-3)
            fields = {"logprobs": 0, "logprob_token_ids": IDS, "return_tokens_as_token_ids": True}
            text = {"prompt": prompt, "max_tokens": 20, "temperature": 0.8, "seed": 5, **fields}
            async with client.session.post("/v1/completions", json=text) as response:
                [choice] = (await response.json())["choices"]
            for found, wanted in zip(choice["logprobs"]["top_logprobs"], expected, strict=True):
                listed = [found[f"token_id:{each}"] for each in IDS]
                assert listed == pytest.approx(wanted, abs=1e-3)
