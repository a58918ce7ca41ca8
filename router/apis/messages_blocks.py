"""Blocks of Anthropic's messages that the model reads: texts, images, documents and results of searches."""

from __future__ import annotations

from typing import Any

import msgspec

from common.errors import InvalidRequest
from router.apis.chat_builder import ChatPart, image_part, text_part, unsupported_part

REFERENCE = "tool_reference"
READ_BLOCKS = ("text", "image", "document", "search_result")
_KNOWN = (
    "text with `text`, image with a base64 or url `source`, document with a text or content `source`, and "
    "search_result with `source`, `title` and `content`"
)


class BlockSource(msgspec.Struct, frozen=True):
    """The source of an image or a document."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: Any = None  # text or blocks


class ContentBlock(msgspec.Struct, frozen=True):
    """One block of a message's content."""

    type: str
    text: str | None = None
    source: BlockSource | str | None = None  # of a search_result: where it is from
    title: str | None = None
    context: str | None = None  # of a document
    citations: Any = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None  # of a tool_reference
    content: Any = None  # in a tool_result: text or blocks; in a search_result: blocks


_blocks = list[ContentBlock]


def content_parts(content: str | list[ContentBlock], where: str) -> list[ChatPart]:
    """Return the parts of a content. Raises InvalidRequest, which names the field."""
    if isinstance(content, str):
        return [text_part(content)]
    return [part for index, block in enumerate(content) for part in block_parts(block, f"{where}[{index}]")]


def given_parts(content: Any, where: str) -> list[ChatPart]:
    """Return the parts of a content whose type is not checked yet. Raises InvalidRequest."""
    if content is None:
        return []
    try:
        given = msgspec.convert(content, str | _blocks)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where} must be a text or a list of blocks: {error}", param=where) from error
    return content_parts(given, where)


def block_parts(block: ContentBlock, where: str) -> list[ChatPart]:
    """Return the parts of one block. Raises InvalidRequest."""
    source = block.source
    match block.type:
        case "text" if block.text is not None:
            return [text_part(block.text)]
        case "tool_reference" if block.tool_name is not None:
            return [text_part(f"Loaded the tool {block.tool_name}.\n")]
        case "image" if isinstance(source, BlockSource):
            if source.type == "url" and source.url is not None:
                return [image_part(source.url, f"{where}.source")]
            if source.type == "base64" and source.data is not None:
                return [image_part(f"data:{source.media_type};base64,{source.data}", f"{where}.source")]
        case "document" if isinstance(source, BlockSource):
            about = {"title": block.title, "context": block.context}
            if source.type == "text" and source.data is not None:
                return _tagged(block, about, [text_part(source.data)], where)
            if source.type == "content" and source.content is not None:
                return _tagged(block, about, given_parts(source.content, f"{where}.source.content"), where)
        case "search_result" if isinstance(source, str) and block.title is not None:
            about = {"source": source, "title": block.title}
            return _tagged(block, about, given_parts(block.content, f"{where}.content"), where)
    raise unsupported_part(block.type, where, _KNOWN)


def _tagged(
    block: ContentBlock, about: dict[str, str | None], content: list[ChatPart], where: str
) -> list[ChatPart]:
    """Return content between tags of the block's type. The entries of `about` come first, each in tags of its name."""
    if isinstance(block.citations, dict) and block.citations.get("enabled"):
        raise InvalidRequest(
            f"{where}.citations: answers cite nothing; leave citations out", param=f"{where}.citations"
        )
    told = "".join(f"<{name}>{value}</{name}>\n" for name, value in about.items() if value is not None)
    return [text_part(f"<{block.type}>\n{told}"), *content, text_part(f"\n</{block.type}>\n")]
