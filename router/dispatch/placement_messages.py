"""Builds the messages that start an attempt: a reservation for the decode node and the prompt for the prefill node."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from common.errors import InvalidRequest
from common.messages.decode_inbox import Reserve
from common.messages.generation import context_tokens
from common.messages.image_inbox import LINK, ImageData
from common.messages.prefill_inbox import Prefill
from router.dispatch.attempt import Attempt
from router.dispatch.generation import GenerationRequest
from router.nodes.outbox import Message
from router.nodes.registry import Node


def placement_messages(
    request: GenerationRequest, attempt: Attempt, tokens: Sequence[int], remaining_ms: int, waited_ms: int
) -> list[Message]:
    """Return the messages in sending order. `tokens`: the prompt and the answer so far."""
    prefill, decode = attempt.prefill, attempt.decode
    listed = list(tokens)  # what messages encode; it does not outlive them
    emitted = len(tokens) - len(request.token_ids)
    spans = tuple(image.span for image in request.images) if request.images else ()
    sampling = request.sampling
    if emitted and sampling.prompt_logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=None)  # the client has them
    if request.states is not None:
        attempt.states = request.states
        request.states.resume(len(tokens))
        sampling = replace(sampling, hidden_states_from=request.states.wanted_from)
    reserve = Reserve(
        room=attempt.room,
        request_id=request.request_id,
        token_ids=listed,
        emitted=emitted,
        sampling=sampling,
        prefill=prefill.register.node,
        deadline_ms=remaining_ms,
        waited_ms=waited_ms,
        salt=request.salt,
        images=spans,
        priority=request.priority,
    )
    prompt = Prefill(
        room=attempt.room,
        request_id=request.request_id,
        token_ids=listed,
        emitted=emitted,
        sampling=sampling,
        decode=decode.incarnation,
        deadline_ms=remaining_ms,
        waited_ms=waited_ms,
        salt=request.salt,
        images=spans,
        priority=request.priority,
    )
    messages: list[Message] = [(decode.routing_id, decode, reserve)]
    if request.images:
        messages += _images(request, prefill)
    messages.append((prefill.routing_id, prefill, prompt))
    return messages


def _images(request: GenerationRequest, prefill: Node) -> list[Message]:
    """Return the images for the prefill node: each once, however often it occurs in the prompt."""
    address = prefill.register.link_id(LINK)
    data = {image.span.digest: image.data for image in request.images}
    return [
        (address, prefill, ImageData(digest=digest, data=each, salt=request.salt))
        for digest, each in data.items()
    ]


def check_length(request: GenerationRequest, limit: int | None) -> None:
    """Raise InvalidRequest if the request needs more than `limit` tokens, which every node supports."""
    wanted = context_tokens(len(request.token_ids), request.sampling.max_tokens)
    if limit is not None and wanted > limit:
        raise InvalidRequest(
            f"prompt and max_tokens together need {wanted} tokens; this cluster serves at most {limit}",
            param="max_tokens",
        )
