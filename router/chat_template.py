"""Chat messages to one prompt text, with the model's own Jinja template in a sandbox."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequest, ModelError
from router.openai_schema import Message

MAX_PROMPT_CHARACTERS = 8 << 20


class ChatTemplate:
    """chat_template.jinja of the directory, else `chat_template` of tokenizer_config.json."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError when the template cannot be compiled. A model without one serves no chat."""
        config = _tokenizer_config(path)
        source = _source(path, config)
        self._variables = {
            name: _token_text(config.get(name))
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda fmt: datetime.datetime.now().strftime(fmt)
        try:
            self._template = environment.from_string(source) if source is not None else None
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template of {path} cannot be compiled: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt, generation prompt included. Raises InvalidRequest("messages")."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        try:
            text = self._template.render(
                messages=[_plain(message, index) for index, message in enumerate(messages)],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise InvalidRequest(
                f"the chat template refused the messages: {error}", param="messages"
            ) from error
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise InvalidRequest(
                f"the rendered prompt has more than {MAX_PROMPT_CHARACTERS} characters", param="messages"
            )
        return text


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it; text parts are joined."""
    content = message.content
    if isinstance(content, list):
        for position, part in enumerate(content):
            if part.type != "text" or part.text is None:
                raise InvalidRequest(
                    f"messages[{index}].content[{position}] has type {part.type!r}; this version takes text parts only",
                    param=f"messages[{index}].content[{position}]",
                )
        content = "".join(part.text or "" for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": content or ""}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _source(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _tokenizer_config(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _token_text(value: Any) -> str | None:
    """A special token is a string, or an object with `content`."""
    return value.get("content") if isinstance(value, dict) else value


def _to_json(value: Any, indent: int | None = None) -> str:
    text = msgspec.json.encode(value)
    return (msgspec.json.format(text, indent=indent) if indent else text).decode()


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
