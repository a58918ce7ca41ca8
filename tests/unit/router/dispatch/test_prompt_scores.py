"""Row B4(e): log-probabilities of a prompt on their way from the prefill node to the reader, with fake nodes."""

from __future__ import annotations

from common.messages.generation import PromptLogprob
from common.messages.node_inbox import Abort
from common.messages.router_inbox import Goodbye, PromptScores
from tests.fakes.router_rig import legs, legs_after_losses, router_rig
from tests.unit.router.dispatch.test_dispatcher import first_token

SCORES = [PromptLogprob(-0.5, 1, (7,), (-0.5,)), PromptLogprob(-1.5, 4, (8,), (-0.25,))]


async def test_they_come_with_the_first_token() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client([1, 2, 3], prompt_logprobs=1)
        _, prompt = await legs(prefill, decode)
        assert prompt.sampling.prompt_logprobs == 1
        for start in (1, 2):
            prefill.say(PromptScores(room=prompt.room, start=start, tokens=SCORES[start - 1 : start]))
        first_token(prefill, prompt.room, 50)
        await client.until(1)
        assert client.deltas[0].prompt_logprobs == SCORES
        decode.tokens(prompt.room, 1, [51], "stop")
        await client.done()
        assert all(not delta.prompt_logprobs for delta in client.deltas[1:])
        rig.nothing_left()


async def test_a_gap_ends_the_attempt_and_what_exceeds_the_prompt_is_dropped() -> None:
    async with router_rig(max_attempts=1) as rig:
        prefill, decode = await rig.pair()
        client = rig.client([1, 2, 3], prompt_logprobs=1)
        _, prompt = await legs(prefill, decode)
        prefill.say(PromptScores(room=prompt.room, start=1, tokens=SCORES * 2))
        prefill.say(PromptScores(room=prompt.room, start=2, tokens=SCORES[:1]))
        await client.done()
        assert "left out" in str(client.error)
        assert (await prefill.expect(Abort)).room == prompt.room
        rig.nothing_left()


async def test_another_attempt_does_not_ask_for_them_again() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair(0)
        client = rig.client([1, 2, 3], prompt_logprobs=1)
        _, prompt = await legs(prefill, decode)
        prefill.say(PromptScores(room=prompt.room, start=1, tokens=SCORES))
        first_token(prefill, prompt.room, 50)
        await client.until(1)
        other = await rig.pair(1)
        prefill.say(Goodbye(incarnation=prefill.ref.incarnation))
        decode.say(Goodbye(incarnation=decode.ref.incarnation))
        _, again = await legs_after_losses(*other)
        assert (again.token_ids, again.sampling.prompt_logprobs) == ([1, 2, 3, 50], None)
        first_token(other[0], again.room, 51, "stop")
        await client.done()
        assert client.ids == [50, 51]
        rig.nothing_left()
