"""Finds a model's chat templates without compiling them, which only the router's text workers do. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint.model_directory import MAX_TEMPLATE_BYTES, MAX_TOKENIZER_CONFIG_BYTES, read_text
from common.checkpoint.model_files import read_json
from common.errors import ModelError

OWN_FILE = "chat_template.jinja"
JSON_FILES = ("chat_template.json", "tokenizer_config.json")  # in this order
FOLDER = "additional_chat_templates"  # of templates beside OWN_FILE, one file each
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates; other names are not used


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template and the file that contains it."""

    text: str
    file: Path
    tool_use: str | None = None  # the template of requests with tools, if it is another

    @property
    def all_text(self) -> str:
        """The text of both templates."""
        return self.text + (self.tool_use or "")


def find_chat_template(model: Path, given: Path | None = None) -> TemplateSource | None:
    """Return the template in `given`, or else the model's own; None if it has none. Raises ModelError.

    Args:
        given: `model.chat_template`, a file of the operator, which may be a link to any place.
    """
    if given is not None:
        if not given.exists():
            raise ModelError(
                f"model.chat_template: {given} does not exist: give an absolute path, or one that is relative to the "
                "cluster file"
            )
        return TemplateSource(read_text(given.resolve(), MAX_TEMPLATE_BYTES), given)
    own = model / OWN_FILE
    if own.is_file():
        return TemplateSource(read_text(own, MAX_TEMPLATE_BYTES), own, _beside(model))
    for file in (model / name for name in JSON_FILES):
        values = read_json(file, MAX_TOKENIZER_CONFIG_BYTES) if file.is_file() else {}
        named = _named(values.get("chat_template"))
        for text in named.values():
            if len(text) > MAX_TEMPLATE_BYTES:
                raise ModelError(
                    f"{file}: chat_template has {len(text)} characters; at most {MAX_TEMPLATE_BYTES} are read"
                )
        if DEFAULT in named:
            return TemplateSource(named[DEFAULT], file, named.get(TOOL_USE))
    return None


def _beside(model: Path) -> str | None:
    """Return the template for tools of a model whose templates are files."""
    folder = model / FOLDER
    if not (folder / f"{TOOL_USE}.jinja").is_file():
        return None
    if folder.is_symlink():
        raise ModelError(f"{folder} is a link; copy the folder into the model directory")
    return read_text(folder / f"{TOOL_USE}.jinja", MAX_TEMPLATE_BYTES)


def _named(template: Any) -> Mapping[str, str]:
    """Return the templates by name: one without a name is the default, several are a list or an object."""
    if isinstance(template, list):
        template = {
            each["name"]: each.get("template")
            for each in template
            if isinstance(each, dict) and isinstance(each.get("name"), str)
        }
    if not isinstance(template, dict):
        template = {DEFAULT: template}
    return {name: text for name, text in template.items() if isinstance(text, str)}
