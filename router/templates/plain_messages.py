"""Converts messages to the form in which a chat template prints them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequest
from router.requests.image_parts import image_parts
from router.requests.openai_schema import Message
from router.templates.call_form import TOOL, CallForm
from router.templates.content_form import DEVELOPER, SYSTEM, Content, ContentForms, text_part
from router.templates.message_calls import template_calls


def plain_messages(messages: Sequence[Message], forms: ContentForms) -> list[dict[str, Any]]:
    """Convert messages to what the template expects. Raises InvalidRequest for parts and calls that are not valid."""
    # All of them before any is joined: it raises for parts of other types, with the index of the message.
    list(image_parts(messages))
    placed = _joined_systems(messages) if forms.single_system else list(enumerate(messages))
    found = list[dict[str, Any]]()
    called = dict[str, str]()  # id -> name of the function
    for index, message in placed:
        plain = _plain(message, forms)
        if message.tool_calls:
            plain["tool_calls"] = template_calls(message.tool_calls, f"messages[{index}]")
            called |= {call["id"]: call["function"]["name"] for call in plain["tool_calls"] if "id" in call}
            found += (forms.calls or CallForm()).messages(plain, _has_text(message))
            continue
        if message.role == TOOL and forms.calls is not None and forms.calls.named_results:
            name = called.get(message.tool_call_id or "")
            plain |= {"name": name} if name and message.name is None else {}
        found.append(plain)
    return found


def _plain(message: Message, forms: ContentForms) -> dict[str, Any]:
    """Convert a message without its calls: images become parts, text takes the form of its role."""
    role = forms.printed_role(message.role)
    form = forms.of(role)
    content: Content
    if not isinstance(message.content, list):
        content = form.of_text(message.content or "")
    else:
        parts = [part for part in message.content if part.reasoning_text is None]
        if any(part.type == "image_url" for part in parts):
            content = [
                {"type": "image"} if part.type == "image_url" else text_part(part.plain_text or "")
                for part in parts
            ]
        else:
            content = form.of_parts([part.plain_text or "" for part in parts])
    plain: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    reasoning = message.thoughts
    if reasoning is not None:
        # Templates use either name.
        plain["reasoning_content"] = plain["reasoning"] = reasoning
    return plain


def _has_text(message: Message) -> bool:
    parts = message.content if isinstance(message.content, list) else []
    return (
        any(part.plain_text or part.type == "image_url" for part in parts) if parts else bool(message.content)
    )


def _joined_systems(messages: Sequence[Message]) -> list[tuple[int, Message]]:
    """Join the texts of all instructions to one message at the beginning, with blank lines between them.

    Each message comes with its index among those that the client sent.
    """
    placed = list(enumerate(messages))
    instructions = [each for each in messages if each.role in (SYSTEM, DEVELOPER)]
    if instructions in ([], [*messages[:1]]) or next(image_parts(instructions), None) is not None:
        return placed
    texts = [
        "\n".join(part.plain_text or "" for part in each.content)
        if isinstance(each.content, list)
        else each.content or ""
        for each in instructions
    ]
    others = [(index, each) for index, each in placed if each.role not in (SYSTEM, DEVELOPER)]
    return [(0, Message(instructions[0].role, "\n\n".join(texts))), *others]


def refuse_lost(messages: Sequence[Message], forms: ContentForms) -> None:
    """Raise InvalidRequest for a message that the template leaves out without a word."""
    remedy = "leave them out, or set another template in model.chat_template"
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.tool_calls and not forms.prints_calls:
            raise InvalidRequest(
                f"{where}: the chat template prints no tool calls of earlier messages; {remedy}",
                param=f"{where}.tool_calls",
            )
        if _has_text(message) and not forms.prints(forms.printed_role(message.role)):
            raise InvalidRequest(
                f"{where}: the chat template prints no messages of the role {message.role}; {remedy}",
                param=f"{where}.role",
            )
