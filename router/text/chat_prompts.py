"""Turns a chat into the tokens of its prompt, with the places of its images."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from common.errors import InvalidRequest
from router.dispatch.generation import PromptImage
from router.http.client import Client, cache_salt
from router.images.loader import Image, ImageLoader
from router.images.placeholders import place_images
from router.requests.chat_input import ChatInput, input_tokens
from router.requests.chat_rules import ChatRules, check_chat
from router.requests.checks import ServedModel, check_request
from router.requests.image_parts import image_parts, without_addresses
from router.requests.openai_schema import ChatRequest
from router.requests.prompt_length import TRUNCATE, PromptLength
from router.templates.prompt_end import prompt_end
from router.text.service import TextService

COUNTED = PromptLength(1 << 24)  # text workers stop long before


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a chat."""

    tokens: array[int]
    images: tuple[Image, ...]  # as loaded
    placed: tuple[PromptImage, ...]  # in the prompt


class ChatPrompts:
    """Renders chats for every route that takes them."""

    def __init__(self, texts: TextService, images: ImageLoader) -> None:
        self._texts = texts
        self._images = images

    async def count(self, body: ChatRequest, model: ServedModel, client: Client) -> int:
        """Return the number of tokens of a chat's prompt, which may exceed the context. Raises InvalidRequest."""
        check_request(body, model)
        rules = check_chat(body, model.answers)
        return len((await self.render(body, rules, model, client, COUNTED)).tokens)

    async def render(
        self, body: ChatRequest, rules: ChatRules, model: ServedModel, client: Client, length: PromptLength
    ) -> ChatPrompt:
        """Return the prompt of a chat. Raises InvalidRequest, or ContextTooLong for what exceeds `length`."""
        if length.kept is not None and next(image_parts(body.messages), None) is not None:
            raise InvalidRequest(
                f"{TRUNCATE} cannot be combined with images: it might cut one in half", param=TRUNCATE
            )
        own, images = input_tokens(body), tuple[Image, ...]()
        if own is None:
            images = await self._images.load(body.messages)
            messages = without_addresses(body.messages) if images else body.messages
            given = ChatInput(list(messages), rules.calls.tools, rules.variables)
            end = prompt_end(body.add_generation_prompt, body.continue_final_message)
            tokens = await self._texts.chat_prompt(given, bool(body.add_special_tokens), length, end)
        else:
            if next(image_parts(body.messages), None) is not None:
                raise InvalidRequest("input_ids cannot be combined with images", param="input_ids")
            length.check(len(own), "input_ids")
            tokens = array("i", length.cut(own))
        if model.vision is None:
            return ChatPrompt(tokens, images, ())
        salt = cache_salt(client.tenant, body.cache_salt)
        with_images, placed = place_images(tokens, images, model.vision, model.vocab_size, salt)
        return ChatPrompt(array("i", with_images), images, placed)
