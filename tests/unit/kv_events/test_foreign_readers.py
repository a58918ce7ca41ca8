"""What a foreign reader has found in our batches still holds, as long as these are published as they were."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.kv_events.read_by_dynamo import CHANGES, PROMPTS, RECORDED, payloads

STEPS: dict[str, Any] = json.loads(RECORDED.read_text())["steps"]
# Tokens of each prompt that are cached on the device, and there or in host memory. Blocks with a salt, and those from
# the first image on, have no tokens, and so Dynamo cannot find them.
FOUND = {
    "two blocks of the prompt": {"prompt": [8, 8]},
    "its third block": {"prompt": [12, 12]},
    "a prompt with a salt": {"prompt": [12, 12]},
    "a prompt with an image": {"prompt": [12, 12], "picture": [4, 4], "text": [4, 4]},
    "text that begins alike": {"prompt": [12, 12], "picture": [4, 4], "text": [8, 8]},
    "the prompt in host memory": {"prompt": [12, 12], "picture": [4, 4], "text": [8, 8]},
    "its third block is evicted": {"prompt": [8, 12], "picture": [4, 4], "text": [8, 8]},
    "all of it is evicted": {"prompt": [0, 12], "picture": [4, 4], "text": [8, 8]},
    "host memory is empty": {"picture": [4, 4], "text": [8, 8]},
    "the rest is gone": {},
}


def test_batches_are_those_that_dynamo_has_read() -> None:
    """If this fails on purpose, run read_by_dynamo.py again."""
    assert {name: payload.hex() for name, payload in payloads().items()} == {
        name: step["payload"] for name, step in STEPS.items()
    }


@pytest.mark.parametrize("name", CHANGES)
def test_dynamo_finds_what_is_cached(name: str) -> None:
    assert STEPS[name]["found"] == {prompt: FOUND[name].get(prompt, [0, 0]) for prompt in PROMPTS}
