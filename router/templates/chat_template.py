"""Renders chat messages to one prompt text, with the model's own Jinja template in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2

from common.checkpoint.chat_template_file import find_chat_template
from common.checkpoint.tokenizer_config import named_tokens, read_tokenizer_config
from common.errors import InvalidRequest, ModelError
from router.requests.openai_schema import Message
from router.templates.call_form import TOOL, probe_tool
from router.templates.content_form import ContentForms
from router.templates.plain_messages import plain_messages, refuse_lost
from router.templates.prompt_end import PromptEnd, render_open
from router.templates.sandbox import TemplateSandbox

MAX_PROMPT_CHARACTERS = 8 << 20


class ChatTemplate:
    """The template of the model, or the one that the cluster file sets instead."""

    def __init__(self, path: Path, given: Path | None = None) -> None:
        """Compile the template. Raises ModelError if that fails. A model without a template serves no chat."""
        source = find_chat_template(path, given)
        # A token that the model lacks stays undefined: templates test for it, and it prints as "".
        self._variables = named_tokens(read_tokenizer_config(path))
        self._sandbox = TemplateSandbox()
        self._template = None if source is None else self._compiled(source.text, source.file)
        self._tool_template = self._template
        if source is not None and source.tool_use is not None:
            self._tool_template = self._compiled(source.tool_use, source.file)

    def _compiled(self, text: str, file: Path) -> jinja2.Template:
        try:
            return self._sandbox.from_string(text)
        except (jinja2.TemplateError, RecursionError) as error:
            line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ModelError(
                f"{file}: the chat template cannot be compiled: {error}{line}; correct it, or set another in "
                "model.chat_template"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        end: PromptEnd = PromptEnd.GENERATION_PROMPT,
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the prompt. Runs on any thread.

        Args:
            tools: functions that the model may call.
            variables: what clients set; the messages, the tools and special tokens take precedence.

        Raises:
            InvalidRequest: the template refuses the messages, or would leave one out without a word.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions, or set model.chat_template",
                param="messages",
            )
        with_tools = bool(tools) or self._needs_tool_template(messages)
        forms = self._tool_forms if with_tools else self._forms
        plain = plain_messages(messages, forms)
        try:
            given = {**variables, "tools": tools if with_tools else None}
            if end is PromptEnd.OPEN_MESSAGE:
                if messages[-1].tool_calls:
                    raise ValueError("the last message has tool calls, so it cannot be continued")
                text = render_open(
                    partial(self.render_plain, generation_prompt=False, variables=given), plain
                )
            else:
                text = self.render_plain(plain, end is PromptEnd.GENERATION_PROMPT, given)
        except Exception as error:  # a template can raise anything that Python can
            raise InvalidRequest(
                f"the chat template refused the messages: {error}", param="messages"
            ) from error
        refuse_lost(messages, forms)
        return text

    def _needs_tool_template(self, messages: Sequence[Message]) -> bool:
        """Return whether the default template would drop calls that the one for tools prints."""
        return (
            self._tool_template is not self._template
            and any(message.tool_calls or message.role == TOOL for message in messages)
            and not self._forms.prints_calls
        )

    @cached_property
    def _forms(self) -> ContentForms:
        """The forms, probed at the first request: a text worker limits the time of rendering but not of loading."""
        return ContentForms(self.render_plain)

    @cached_property
    def _tool_forms(self) -> ContentForms:
        """The forms of requests with tools, whose template may be another."""
        return ContentForms(partial(self.render_plain, variables={"tools": [probe_tool()]}))

    def render_plain(
        self,
        messages: Sequence[dict[str, Any]],
        generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render messages unchanged. Raises whatever the template raises."""
        template = self._template if variables.get("tools") is None else self._tool_template
        assert template is not None
        given = {
            "tools": None,
            **variables,
            **self._variables,
            "messages": messages,
            "add_generation_prompt": generation_prompt,
            "documents": None,
        }
        return self._sandbox.render(template, given, MAX_PROMPT_CHARACTERS)
