"""The ids of prompts that SGLang's clients send as a list, one for each."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InvalidRequest
from router.http.errors import clean_request_id


def listed_ids(given: Sequence[str]) -> list[str]:
    """Return the ids of prompts as they are used. Raises InvalidRequest if two are the same, or nothing is left."""
    found: list[str] = []
    for index, each in enumerate(given):
        identity = clean_request_id(each)
        if not identity:
            raise InvalidRequest("an id needs a letter or a digit", param=f"rid[{index}]")
        if identity in found:
            raise InvalidRequest(
                f"the id {identity} is that of an earlier prompt, too", param=f"rid[{index}]"
            )
        found.append(identity)
    return found
