"""Refusals of a translated request, under the names of the API that the client uses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from common.errors import InvalidRequest


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field of a refusal that is raised inside: `names` maps translated names to the client's."""
    try:
        yield
    except InvalidRequest as error:
        renamed = renamed_refusal(error, names)
        if renamed is error:
            raise
        raise renamed from error


def renamed_refusal(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return a refusal under the client's name of its field, or the same one if `names` lacks the field."""
    renamed = _renamed(error.param or "", names)
    if renamed is None:
        return error
    inner, outer = renamed
    message = re.sub(rf"(?<![\w.]){re.escape(inner)}(?!\w)", lambda _: outer, str(error))
    return type(error)(message, param=outer + (error.param or "").removeprefix(inner))


def _renamed(param: str, names: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (translated name, client's name) of the field that `param` names, or the field that contains it.

    `[]` in a name stands for the number of any item.
    """
    for name in sorted(names, key=len, reverse=True):
        pattern = re.escape(name).replace(re.escape("[]"), r"\[(\d+)\]")
        found = re.match(rf"{pattern}(?=[.\[]|$)", param)
        if found is not None:
            return found[0], names[name].replace("[]", "[{}]").format(*found.groups())
    return None
