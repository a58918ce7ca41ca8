"""A garbage collection visits no token ids of running requests: they are in arrays, not in lists."""

from __future__ import annotations

import asyncio
import gc

import pytest

from common.messages.decode_inbox import Reserve
from common.messages.generation import OutputToken
from common.messages.router_inbox import FirstToken
from tests.fakes.router_rig import legs, router_rig
from tests.fakes.waiting import eventually
from tests.unit.router.conftest import Rig

LONG = 700
WORD = "apple "


def long_lists() -> int:
    """Return the number of lists and tuples as long as the prompts of these tests, which collections visit."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) in (list, tuple) and len(each) >= LONG]
    return sum(type(each[LONG // 2]) is int for each in found)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [300 + at % 99 for at in range(LONG)]}),
        ("/v1/completions", {"prompt": [[5], [300 + at % 99 for at in range(LONG)]]}),
        ("/v1/completions", {"prompt": WORD * LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORD * LONG}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}], "input_ids": [300 + at % 99 for at in range(LONG)]},
        ),
    ],
)
async def test_a_running_request_has_no_list_of_its_prompt(
    rig: Rig, path: str, body: dict[str, object]
) -> None:
    before = long_lists()
    rig.generator.will(60.0)
    asked = [asyncio.create_task(rig.post(path, {**body, "max_tokens": 1})) for _ in range(3)]
    await eventually(lambda: len(rig.generator.requests) >= len(asked))
    assert all(len(each.token_ids) in (1, *range(LONG, 4096)) for each in rig.generator.requests)
    assert long_lists() == before
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_an_attempt_keeps_no_list_of_its_messages_and_its_answer() -> None:
    async with router_rig(max_requests=4) as rig:
        prefill, decode = await rig.pair()
        before = long_lists()
        client = rig.client([1, 2, 3], max_tokens=3 * LONG)
        reserve, _ = await legs(prefill, decode)
        assert isinstance(reserve, Reserve)
        room = reserve.room
        del reserve
        prefill.say(FirstToken(room=room, token=OutputToken(0), finish_reason=None, cached_tokens=0))
        for offset in range(1, LONG + 10, 16):
            decode.tokens(room, offset, [300] * 16)
        await client.until(LONG + 10)
        client.deltas.clear()
        assert long_lists() == before
        await client.leave()
