"""Finds a model's chat template without compiling it, which only the router's text workers do. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint.model_directory import MAX_TEMPLATE_BYTES, MAX_TOKENIZER_CONFIG_BYTES, read_text
from common.checkpoint.model_files import read_json
from common.errors import ModelError

OWN_FILE = "chat_template.jinja"
JSON_FILES = ("chat_template.json", "tokenizer_config.json")  # in this order


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template and the file that contains it."""

    text: str
    file: Path


def find_chat_template(model: Path, given: Path | None = None) -> TemplateSource | None:
    """Return the template in `given`, or else the model's own; None if it has none. Raises ModelError.

    Args:
        given: `model.chat_template`, a file of the operator, which may be a link to any place.
    """
    if given is not None:
        return TemplateSource(read_text(given.resolve(), MAX_TEMPLATE_BYTES), given)
    own = model / OWN_FILE
    if own.is_file():
        return TemplateSource(read_text(own, MAX_TEMPLATE_BYTES), own)
    for file in (model / name for name in JSON_FILES):
        values = read_json(file, MAX_TOKENIZER_CONFIG_BYTES) if file.is_file() else {}
        if "chat_template" in values:
            text = _default(values["chat_template"])
            if text is not None and len(text) > MAX_TEMPLATE_BYTES:
                raise ModelError(
                    f"{file}: chat_template has {len(text)} characters; at most {MAX_TEMPLATE_BYTES} are read"
                )
            return None if text is None else TemplateSource(text, file)
    return None


def _default(template: Any) -> str | None:
    """Return the template; if there are several named ones, the one called `default`."""
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
