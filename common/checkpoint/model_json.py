"""Parses JSON of a model directory within bounds on nesting and on the number of values. No torch.

Python's parser needs 100 bytes and more for two bytes of text (`[]`), and recurses once per bracket. The input is
therefore measured before it is parsed, so that memory use is bounded and the error is a sentence.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import accumulate
from typing import Any, NoReturn

from common.errors import ModelError

MAX_DEPTH = 64
MAX_VALUES = 500_000  # per configuration file
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_STEPS = [{ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}.get(byte, 0) for byte in range(256)]
_NOT_BRACKETS = bytes(byte for byte in range(256) if not _STEPS[byte])


def parse_json(data: bytes, where: str, max_values: int = MAX_VALUES, unique: bool = False) -> Any:
    """Parse UTF-8 JSON. Raises ModelError that begins with `where`.

    Args:
        max_values: maximum number of values; brackets and commas are counted.
        unique: refuse objects with a duplicate key; otherwise the last value counts, as for other readers.
    """
    _check_bounds(data, where, max_values)
    try:
        return json.loads(
            data.decode(), parse_constant=_refuse_constant, object_pairs_hook=_unique if unique else None
        )
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not valid JSON: {error}") from error


def _check_bounds(data: bytes, where: str, max_values: int) -> None:
    # Strings are removed one by one, so their number is bounded first.
    many = data.count(b'"') > 8 * max_values
    bare = b"" if many else _STRING.sub(b"", data)
    brackets = bare.translate(None, _NOT_BRACKETS)
    if many or len(brackets) + bare.count(b",") > 2 * max_values:
        raise ModelError(f"{where} is JSON of more than the {max_values} values that are read")
    depth = max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)
    if depth > MAX_DEPTH:
        raise ModelError(f"{where} is JSON nested {depth} levels deep; at most {MAX_DEPTH} are read")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {name!r} appears twice")
    return found
