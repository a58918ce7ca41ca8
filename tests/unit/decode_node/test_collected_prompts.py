"""A garbage collection visits no token ids of the requests that a node holds, however many and long they are."""

from __future__ import annotations

import gc

from common.messages.decode_inbox import Reserve, codec
from common.messages.generation import SamplingParams
from common.messages.identity import NodeRef
from common.messages.wire import encode
from common.node.to_router import NO_ROUTER
from decode_node.request import DecodeRequest


def test_the_prompt_of_a_request_is_no_list() -> None:
    prefill = NodeRef(name="prefill-0", role="prefill", incarnation="i", peer_address="ipc:///nowhere")
    sampling = SamplingParams(max_tokens=5, temperature=0.0)
    prompt = [7, 1 << 40, 300]
    message = Reserve(
        room=1,
        request_id="r",
        token_ids=prompt,
        emitted=0,
        sampling=sampling,
        prefill=prefill,
        deadline_ms=1000,
    )
    received = codec.decode(encode(message))
    assert isinstance(received, Reserve)
    request = DecodeRequest.of(received, NO_ROUTER, 0.0)
    assert list(request.prompt) == prompt
    assert not [each for each in gc.get_referents(request.prompt) if isinstance(each, int)]
    request.output += [5, 6]
    assert [*request.contents] == prompt
