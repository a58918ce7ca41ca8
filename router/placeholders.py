"""Where images stand in a tokenized prompt: the template's one placeholder becomes as many as an image has rows."""

from __future__ import annotations

from collections.abc import Sequence

from common.checkpoint.vision_config import VisionConfig
from common.errors import InvalidRequest
from common.messages.generation import ImageSpan
from common.messages.image_inbox import salted_digest
from router.generation import PromptImage
from router.images import Image


def place_images(
    token_ids: Sequence[int],
    images: Sequence[Image],
    vision: VisionConfig,
    vocab_size: int,
    salt: bytes = b"",
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Token ids of the vocabulary with room for every image, and where that is. Nodes cache images by content and salt.

    A placeholder outside the vocabulary is written as a token that the prompt has anyway: nothing embeds it, and
    repetition_penalty falls on no token that the prompt lacks. Raises InvalidRequest where the text itself spells the
    placeholder, which would move the images.
    """
    filler = vision.image_token_id
    if filler >= vocab_size:
        filler = next((token for token in token_ids if token != filler), 0)
    prompt: list[int] = []
    placed: list[PromptImage] = []
    if any(token in vision.refused_token_ids for token in token_ids):
        raise InvalidRequest(
            "the messages spell the placeholder of a video; videos are not supported", param="messages"
        )
    placeholders = sum(token == vision.image_token_id for token in token_ids)
    if placeholders != len(images):
        raise InvalidRequest(
            f"the prompt has {placeholders} placeholders for {len(images)} images; leave the placeholder's own text "
            "out of the messages",
            param="messages",
        )
    for token in token_ids:
        if token != vision.image_token_id:
            prompt.append(token)
            continue
        image = images[len(placed)]
        tokens = image.rows * image.columns
        digest = salted_digest(image.digest, salt)
        placed.append(PromptImage(ImageSpan(len(prompt), tokens, digest, image.rows), image.data))
        prompt += [filler] * tokens
    return prompt, tuple(placed)
