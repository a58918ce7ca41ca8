"""Expands the template's single placeholder per image to one placeholder for each token of the image."""

from __future__ import annotations

from collections.abc import Sequence

from common.checkpoint.vision_config import VisionConfig
from common.errors import InvalidRequest
from common.messages.generation import ImageSpan
from common.messages.image_inbox import salted_digest
from router.dispatch.generation import PromptImage
from router.images.loader import Image


def place_images(
    token_ids: Sequence[int],
    images: Sequence[Image],
    vision: VisionConfig,
    vocab_size: int,
    salt: bytes = b"",
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return the prompt with a run of placeholder tokens for every image, and the span of each run.

    Nodes cache images by content and salt. A placeholder token outside the vocabulary is replaced by a token that the
    prompt contains anyway: it is never embedded, and so repetition_penalty affects no token that is not in the prompt.
    Raises InvalidRequest if the text itself contains the placeholder, which would shift the images, or if the template
    leaves out an image.
    """
    filler = vision.image_token_id
    if filler >= vocab_size:
        filler = next((token for token in token_ids if token != filler), 0)
    prompt: list[int] = []
    placed: list[PromptImage] = []
    if any(token in vision.refused_token_ids for token in token_ids):
        raise InvalidRequest(
            "the messages contain the placeholder of a video; videos are not supported", param="messages"
        )
    placeholders = sum(token == vision.image_token_id for token in token_ids)
    if placeholders != len(images):
        remedy = "remove the placeholder's text from the messages"
        if placeholders < len(images):
            remedy = "the chat template leaves out images of some roles: send them in messages of the user"
        raise InvalidRequest(
            f"the prompt has {placeholders} placeholders for {len(images)} images; {remedy}", param="messages"
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
