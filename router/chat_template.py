"""Chat messages to one prompt text, with the model's own Jinja template in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from common.errors import InvalidRequest, ModelError
from common.model_directory import MAX_TEMPLATE_BYTES, MAX_TOKENIZER_CONFIG_BYTES, read_text
from common.model_files import read_json
from router.openai_schema import Message, image_parts
from router.template_sandbox import TemplateSandbox

MAX_PROMPT_CHARACTERS = 8 << 20
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """chat_template.jinja of the directory, else `chat_template` of chat_template.json or tokenizer_config.json."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError when the template cannot be compiled. A model without one serves no chat."""
        config = _read_config(path / "tokenizer_config.json")
        source = _source(path, _read_config(path / "chat_template.json"), config)
        # a token that the model does not have stays undefined: templates test for it, and print it as ""
        self._variables = {
            name: text for name in SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None
        }
        self._sandbox = TemplateSandbox()
        try:
            self._template = self._sandbox.from_string(source) if source is not None else None
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template of {path} cannot be compiled: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt, generation prompt included. Raises InvalidRequest("messages"). May run on any thread."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        variables = {
            **self._variables,
            "messages": [_plain(message) for message in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        try:
            return self._sandbox.render(self._template, variables, MAX_PROMPT_CHARACTERS)
        except Exception as error:  # a template can raise anything that Python can
            raise InvalidRequest(
                f"the chat template refused the messages: {error}", param="messages"
            ) from error


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: parts where there are images, text parts alone joined."""
    content: str | list[dict[str, str]] | None
    if isinstance(message.content, list):
        images = len(list(image_parts([message])))  # and refuses parts of other types
        if images:
            content = [
                {"type": "image"} if part.type == "image_url" else {"type": "text", "text": part.text or ""}
                for part in message.content
            ]
        else:
            content = "".join(part.text or "" for part in message.content)
    else:
        content = message.content
    plain: dict[str, Any] = {"role": message.role, "content": content or ""}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _source(path: Path, *configs: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return read_text(file, MAX_TEMPLATE_BYTES)
    template = next((each["chat_template"] for each in configs if "chat_template" in each), None)
    if isinstance(template, list):  # named templates
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    if isinstance(template, str) and len(template) > MAX_TEMPLATE_BYTES:
        raise ModelError(
            f"{path}: chat_template has {len(template)} characters; at most {MAX_TEMPLATE_BYTES} are read"
        )
    return template if isinstance(template, str) else None


def _read_config(file: Path) -> dict[str, Any]:
    return read_json(file, MAX_TOKENIZER_CONFIG_BYTES) if file.is_file() else {}


def _token_text(value: Any) -> str | None:
    """A special token is a string, or an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
