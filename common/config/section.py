"""The base of all sections of a cluster file, and the types of values that several of them have."""

from __future__ import annotations

from functools import cache
from typing import Annotated

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(gt=0, le=0.98)]  # share of a GPU; the driver reserves some memory
NotNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
# A name, or a pattern of names: common/node_names.py. In the expression, $ would allow a newline.
NodeName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,62}\*?\Z", max_length=63)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: strict and immutable."""


@cache
def fields_of(section: type[Section]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return a section's fields, which msgspec works out anew for each call."""
    return msgspec.structs.fields(section)
