"""Structural tags: free text in which a trigger starts one of several tags, whose content is JSON by a schema.

The form is the one that vLLM and SGLang take: `structures` of `begin`, `schema` and `end`, and `triggers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from common.errors import InvalidRequest
from router.grammar.lark import ANY_TEXT, Lark, LarkWriter, sequence

MAX_TAGS, MAX_TRIGGERS = 128, 16
_Marker = Annotated[str, Meta(min_length=1, max_length=256)]


class Tag(msgspec.Struct, frozen=True, array_like=True):
    """One tag: `begin`, JSON that the schema accepts, `end`."""

    begin: str
    schema: str  # JSON text
    end: str


class Tags(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Any text with these tags in it. A trigger must be followed by the rest of a tag that begins with it."""

    tags: list[Tag]
    triggers: list[str]

    @property
    def markers(self) -> str:
        """All texts in which special tokens count."""
        return " ".join([*self.triggers, *(part for each in self.tags for part in (each.begin, each.end))])


class _Structure(msgspec.Struct, frozen=True):
    begin: _Marker
    schema: msgspec.Raw = msgspec.Raw(b"{}")
    end: Annotated[str, Meta(max_length=256)] = ""


class _GivenTags(msgspec.Struct, frozen=True):
    structures: Annotated[list[_Structure], Meta(min_length=1, max_length=MAX_TAGS)]
    triggers: Annotated[list[_Marker], Meta(min_length=1, max_length=MAX_TRIGGERS)]


_decoder = msgspec.json.Decoder(_GivenTags)


def read_tags(text: str, field: str) -> Tags:
    """Parse the JSON text of a structural tag. Raises InvalidRequest with the field."""
    try:
        given = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise InvalidRequest(
            f"{field} needs structures with begin, schema and end, and triggers: {str(error)[:300]}",
            param=field,
        ) from error
    for structure in given.structures:
        found = [trigger for trigger in given.triggers if structure.begin.startswith(trigger)]
        if len(found) != 1:
            raise InvalidRequest(
                f"{field}: {structure.begin[:80]!r} begins with {len(found)} of the triggers; it must be one",
                param=field,
            )
    if unused := [
        each for each in given.triggers if not any(s.begin.startswith(each) for s in given.structures)
    ]:
        raise InvalidRequest(f"{field}: no structure begins with the trigger {unused[0][:80]!r}", param=field)
    tags = [Tag(each.begin, bytes(each.schema).decode(), each.end) for each in given.structures]
    return Tags(tags, list(dict.fromkeys(given.triggers)))


def tags_grammar(form: Tags, special: Mapping[str, int]) -> Lark:
    """Return the grammar of structural tags. Raises ValueError.

    `special`: ids of the special tokens in the markers, which ordinary text cannot match.
    """
    lark, pieces = LarkWriter(special), list[str]()
    for number, trigger in enumerate(form.triggers):
        begun = {index: tag for index, tag in enumerate(form.tags) if tag.begin.startswith(trigger)}
        for index, tag in begun.items():
            _check_whole_tokens(trigger, tag, lark)
            lark.schemas[f"content_{index}"] = tag.schema
            rest, end = lark.literal(tag.begin.removeprefix(trigger)), lark.literal(tag.end)
            lark.rules.append(f"tag_{index}: {sequence(rest, f'@content_{index}', end)}")
        if trigger not in special and lark.special_tokens.search(trigger):
            raise ValueError(
                f"the trigger {trigger[:80]!r} has a special token in it; make the trigger this token and nothing else"
            )
        begin = lark.until(trigger, f"begin_{number}")
        lark.rules.append(f"piece_{number}: {begin} ({' | '.join(f'tag_{index}' for index in begun)})")
        pieces.append(f"piece_{number}")
    return lark.finished(f"({' | '.join(pieces)})* {ANY_TEXT}")


def _check_whole_tokens(trigger: str, tag: Tag, lark: LarkWriter) -> None:
    """Raise ValueError if the trigger of a tag ends inside a special token."""
    for match in lark.special_tokens.finditer(tag.begin):
        if match.start() < len(trigger) < match.end():
            raise ValueError(
                f"the trigger {trigger[:80]!r} ends inside the special token {match[0]}: let it contain all"
            )
