"""Requests whose answers are compared with and without the death of a node, complete and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cluster.harness import Client

LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A body without `stream`. `tokens`: how much of the answer the router has received when the decode node dies."""

    name: str
    path: str
    body: dict[str, Any]
    tokens: int


async def ask(client: Client, case: Case, stream: bool, request_id: str = "") -> dict[str, Any]:
    """Return the only choice of the answer and its `usage`; a stream is merged into the same form."""
    body = {**case.body, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    headers = {"X-Request-Id": request_id} if request_id else {}
    async with client.session.post(f"/v1/{case.path}", json=body, headers=headers) as response:
        text = await response.text()
        assert response.status == 200, text
    if not stream:
        answer = json.loads(text)
        (choice,) = answer["choices"]
        return {**_flat(choice, choice.get("message", {})), "usage": answer["usage"]}
    return _put_together(text)


def _put_together(text: str) -> dict[str, Any]:
    *lines, last = [line for line in text.splitlines() if line]
    assert last == "data: [DONE]", text[-500:]
    whole: dict[str, Any] = {"text": "", "logprobs": None, "finish_reason": None}
    for line in lines:
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        if event.get("usage") is not None:
            whole["usage"] = event["usage"]
        for choice in event["choices"]:
            part = _flat(choice, choice.get("delta", {}))
            whole["text"] += part["text"]
            assert whole["finish_reason"] is None, "events follow the one with the finish_reason"
            whole["finish_reason"] = part["finish_reason"]
            whole["logprobs"] = _joined(whole["logprobs"], part["logprobs"])
    return whole


def _flat(choice: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    text = choice.get("text", said.get("content")) or ""
    return {"text": text, "logprobs": choice["logprobs"], "finish_reason": choice["finish_reason"]}


def _joined(before: dict[str, Any] | None, more: dict[str, Any] | None) -> dict[str, Any] | None:
    """Concatenate lists of logprobs."""
    if before is None or more is None:
        return before or more
    return {
        key: value + more[key] if isinstance(value, list) and more[key] is not None else value
        for key, value in before.items()
    }


def expect_equal(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Expect equality except for rounding of logprobs, and return their largest difference."""
    assert (found["text"], found["finish_reason"], found["usage"]) == (
        wanted["text"],
        wanted["finish_reason"],
        wanted["usage"],
    )
    pairs = list(zip(_leaves(found), _leaves(wanted), strict=True))
    differences = [0.0]
    for mine, theirs in pairs:
        if isinstance(theirs, float):
            assert mine == pytest.approx(theirs, abs=LOGPROB_TOLERANCE)
            differences.append(abs(mine - theirs))
        else:
            assert mine == theirs
    return max(differences)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield all leaves; keys and their order count too."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _leaves(each)
    elif isinstance(value, list):
        yield len(value)
        for each in value:
            yield from _leaves(each)
    else:
        yield value
