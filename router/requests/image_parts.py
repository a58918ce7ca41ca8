"""The images in the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from common.errors import InvalidRequest
from router.requests.openai_schema import Message


def image_parts(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yield (field path, URL) of every image in order. Raises InvalidRequest for parts of unknown types."""
    for index, message in enumerate(messages):
        for position, part in enumerate(message.content if isinstance(message.content, list) else ()):
            where = f"messages[{index}].content[{position}]"
            if part.type == "image_url" and part.image_url is not None:
                url = part.image_url
                yield f"{where}.image_url", url if isinstance(url, str) else url.url
            elif part.plain_text is None and (part.reasoning_text is None or message.role != "assistant"):
                raise InvalidRequest(
                    f"{where} has type {part.type!r}; send text parts with `text` and image_url parts with `image_url`",
                    param=where,
                )


def without_addresses(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without the URLs of their images, which are megabytes of base64 and loaded already."""
    return [
        msgspec.structs.replace(
            message,
            content=[
                part if part.image_url is None else msgspec.structs.replace(part, image_url="")
                for part in message.content
            ],
        )
        if isinstance(message.content, list)
        else message
        for message in messages
    ]
