"""Chat messages to one prompt text, with the model's own Jinja template in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from common.errors import InvalidRequest, ModelError
from common.model_directory import MAX_TEMPLATE_BYTES, MAX_TOKENIZER_CONFIG_BYTES, read_text
from common.model_files import read_json
from router.content_form import Content, ContentForms, text_part
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
        plain = [self._plain(message) for message in messages]
        try:
            return self.render_plain(plain)
        except Exception as error:  # a template can raise anything that Python can
            raise InvalidRequest(
                f"the chat template refused the messages: {error}", param="messages"
            ) from error

    @cached_property
    def _forms(self) -> ContentForms:
        """Found with the first request: rendering is limited in a text worker, loading is not."""
        return ContentForms(self.render_plain)

    def render_plain(self, messages: Sequence[dict[str, Any]]) -> str:
        """Render messages as they are. Raises whatever the template raises."""
        assert self._template is not None
        variables = {
            **self._variables,
            "messages": messages,
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        return self._sandbox.render(self._template, variables, MAX_PROMPT_CHARACTERS)

    def _plain(self, message: Message) -> dict[str, Any]:
        """A message as the template expects it: its images as parts, its text in the form of its role."""
        form = self._forms.of(message.role)
        content: Content
        if not isinstance(message.content, list):
            content = form.of_text(message.content or "")
        elif list(image_parts([message])):  # refuses parts of other types
            content = [
                {"type": "image"} if part.type == "image_url" else text_part(part.text or "")
                for part in message.content
            ]
        else:
            content = form.of_parts([part.text or "" for part in message.content])
        plain: dict[str, Any] = {"role": message.role, "content": content}
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
