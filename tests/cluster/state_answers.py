"""Hidden states over HTTP, compared with those of `transformers` in float32."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import torch

from tests.cluster.conftest import Reference
from tests.cluster.harness import Client

TOLERANCE = 1e-4


async def _post(client: Client, path: str, body: dict[str, Any]) -> Any:
    async with client.session.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def _last_event(client: Client, path: str, body: dict[str, Any]) -> Any:
    async with client.session.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        *_, last, done, _ = (await response.text()).split("\n\n")
    assert done == "data: [DONE]"
    return json.loads(last.removeprefix("data: "))


async def check_hidden_states(
    client: Client, reference: Reference, prompts: Sequence[list[int]], tokens: int
) -> None:
    """Ask for the states of all positions, and for those of the last one, of greedy answers that run together."""
    sampling = {"max_new_tokens": tokens, "temperature": 0}
    asked = {"sampling_params": sampling, "return_hidden_states": True}
    native = [_post(client, "/generate", {"input_ids": prompt, **asked}) for prompt in prompts]
    short = {"max_tokens": tokens, "temperature": 0, "return_hidden_states": True}
    texts = [_post(client, "/v1/completions", {"prompt": prompt, **short}) for prompt in prompts]
    answers = await asyncio.gather(*native, *texts)
    streamed = await _last_event(client, "/generate", {"input_ids": prompts[0], **asked})
    for found, expected in zip(
        streamed["meta_info"]["hidden_states"], answers[0]["meta_info"]["hidden_states"], strict=True
    ):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=TOLERANCE, rtol=0)
    for index, prompt in enumerate(prompts):
        answer, text = answers[index], answers[len(prompts) + index]
        ids = answer["output_ids"]
        assert ids == reference.ids(prompt, len(ids))
        of_prompt, *of_tokens = answer["meta_info"]["hidden_states"]
        assert (len(of_prompt), len(of_tokens)) == (len(prompt), len(ids) - 1)
        found = torch.tensor([*of_prompt, *of_tokens])
        torch.testing.assert_close(found, reference.states(prompt + ids)[:-1], atol=TOLERANCE, rtol=0)
        last = torch.tensor(text["choices"][0]["hidden_states"])
        torch.testing.assert_close(last, found[-1], atol=TOLERANCE, rtol=0)
