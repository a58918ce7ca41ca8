"""Response templates: the declarative format of `transformers` that says how a model marks reasoning and tool calls.

The library validates and compiles a template and turns whole regions into values. Following an answer while it is
generated is done in `answer_parser`: the library's own parser raises for malformed or cut-off calls, ends a call at a
marker inside a JSON string, and yields arguments only when a call is complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import regex

from common.errors import ModelError

REASONING = ("reasoning_content", "reasoning", "thinking")  # names that templates give the field
CALLS = "tool_calls"
MAX_HELD = 1024  # characters that may be held back as the beginning of a marker
SEARCH_SECONDS = 0.2  # for one search of a pattern that comes with a checkpoint
# a first character that stands for itself and is not optional
_PLAIN_START = re.compile(r"(?:\\(\W)|([^\s.^$*+?{}\[\]\\|()]))(?![*?{])")
_ESCAPED = re.compile(r"\\.")
_LEADING_BLANKS = re.compile(r"^\\s[*+]\??")
_GROUP = "ahead"


Find = Callable[[str], Iterable[Any]]


class Shape(Enum):
    """The form in which a field writes tool calls."""

    OBJECTS = auto()  # JSON objects with name and arguments, or lists of them
    NAMED_JSON = auto()  # the marker names the function, and the region is its arguments as JSON
    NAMED_XML = auto()  # the marker names the function, and the region has a tag for each argument
    OTHER = auto()  # whatever the library makes of the whole region


@dataclass(frozen=True, slots=True)
class Marker:
    """Opens or closes a region."""

    pattern: Any  # regex.Pattern
    literal: bool  # a complete match cannot become longer
    first: frozenset[str] | None  # the characters with which it can begin, where they are known
    seconds: float | None  # limit for one search
    only: str | None = None  # the literal that it is, if there is only one

    @property
    def ahead(self) -> bool:
        """True if it ends with a lookahead."""
        return _GROUP in self.pattern.groupindex

    def search(self, text: str, start: int, final: bool) -> Any:
        """Return the first match, which may be `partial` unless `final`. Raises TimeoutError."""
        if self.seconds is None:
            return self.pattern.search(text, start, partial=not final)
        return self.pattern.search(text, start, partial=not final, timeout=self.seconds)


@dataclass(frozen=True, slots=True)
class AnswerRegion:
    """One field of a template."""

    name: str
    open: Marker | None  # None: text outside of all other regions belongs to it
    close: Marker | None
    shape: Shape = Shape.OTHER
    tags: Find | None = None  # NAMED_XML: finds arguments, as groups `key` and `value`
    tag_end: str | None = None  # NAMED_XML: the literal that ends each argument, where it is known


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """A compiled template."""

    regions: tuple[AnswerRegion, ...]
    anchors: Find  # finds where messages of the assistant begin: the answer's is the last one in the prompt
    text: str  # all strings of the fields, to find the special tokens that markers consist of
    # the library's parser for a complete text
    whole: Callable[[str, Sequence[dict[str, Any]]], dict[str, Any]]

    @property
    def reasons(self) -> bool:
        return any(region.name in REASONING for region in self.regions)

    @property
    def calls(self) -> bool:
        return any(region.name == CALLS for region in self.regions)


def end_of(match: Any) -> int:
    """Return where a marker ends: a lookahead belongs to what follows."""
    ahead = match.re.groupindex.get(_GROUP)
    return int(match.end() if ahead is None or match.start(ahead) < 0 else match.start(ahead))


def compile_template(
    spec: dict[str, Any], source: str, trusted: bool, tag_end: str | None = None
) -> ResponseTemplate:
    """Compile a template.

    Args:
        source: where the template comes from, for errors.
        trusted: False for templates of checkpoints, whose patterns are searched under a time limit.
        tag_end: the literal that ends each argument in a format with tags.

    Raises:
        ModelError: the template is not valid.
    """
    # Loading the library takes half a second and 57 MiB: only a router whose model has a template pays for it.
    from transformers.utils.chat_parsing import parse_response
    from transformers.utils.chat_parsing.response_templates import load_response_template

    seconds = None if trusted else SEARCH_SECONDS
    try:
        loaded = load_response_template(spec)
        regions = tuple(
            AnswerRegion(
                name,
                _marker(field.open_re, field.open_literals, field.open_literal_can_extend, seconds),
                _marker(field.close_re, field.close_literals, field.close_literal_can_extend, seconds),
                *_calls(field, tag_end, seconds),
            )
            for name, field in loaded.fields.items()
        )
    except (ValueError, TypeError, AttributeError, KeyError, regex.error) as error:
        raise ModelError(
            f"{source}: the response template is not valid: {error}; correct it, or set model.response_template"
        ) from error
    return ResponseTemplate(
        regions,
        lambda text: loaded.start_anchor_re.finditer(text, timeout=seconds),
        "".join(_strings(spec["fields"])).replace("\\", ""),
        lambda text, tools: parse_response(text, loaded, prefix="", tools=list(tools)),
    )


def _marker(
    pattern: Any, literals: list[str] | None, can_extend: bool, seconds: float | None
) -> Marker | None:
    if pattern is None:
        return None
    if literals is not None:
        first = frozenset(literal[0] for literal in literals)
        return Marker(pattern, not can_extend, first, seconds, literals[0] if len(literals) == 1 else None)
    # Blanks around markers are dropped by the parser: searching for them would read held blanks again and again.
    source = _lookahead_as_group(_LEADING_BLANKS.sub("", pattern.pattern))
    start = None if "|" in _ESCAPED.sub("", source) else _PLAIN_START.match(source)
    begin = None if start is None else frozenset((start[1] or start[2],))
    return Marker(regex.compile(source, regex.DOTALL), False, begin, seconds)


def _lookahead_as_group(source: str) -> str:
    """Turn the lookahead that ends a pattern into a group: the library finds partial matches only outside of them."""
    before, found, after = source.partition("(?=")
    if not found or "(?=" in after:
        return source
    depth, end = 1, 0
    plain = _ESCAPED.sub("..", after)
    while end < len(plain) and depth:
        depth += {"(": 1, ")": -1}.get(plain[end], 0)
        end += 1
    if after[end : end + 1] not in ("", "|"):
        return source
    return f"{before}(?P<{_GROUP}>{after}"


def _calls(field: Any, tag_end: str | None, seconds: float | None) -> tuple[Any, ...]:
    """Return (shape, tags, tag_end) of a field."""
    if field.name != CALLS or field.open_re is None:
        return ()
    transform = field.transform if isinstance(field.transform, dict) else {}
    function = transform.get("function", transform if "name" in transform else None)
    named = function == {"name": "{name}", "arguments": "{content}"} and not field.transform_each
    if field.content == "json" and not field.content_args:
        if named:
            return (Shape.NAMED_JSON,)
        objects: list[Any] = ["{content}", None]
        objects += [
            {"name": f"{{{where}name}}", "arguments": f"{{{where}{key}}}"}
            for where in ("", "content.")
            for key in ("arguments", "parameters")
        ]
        return (Shape.OBJECTS,) if function in objects else (Shape.OTHER,)
    plain = not (set(field.content_args) - {"tag_pattern"})
    if field.content == "xml-inline" and named and plain:
        pattern = regex.compile(field.content_args["tag_pattern"], regex.DOTALL)
        return Shape.NAMED_XML, lambda text: pattern.finditer(text, timeout=seconds), tag_end
    if seconds is not None:
        raise ValueError(
            "its tool calls need the library's own patterns, which run without a time limit and therefore only if "
            "model.response_template names a file with this template"
        )
    return (Shape.OTHER,)


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in items for text in _strings(each)]
