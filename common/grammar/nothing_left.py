"""The error of a request whose fields leave no token that could come next."""

from __future__ import annotations

from collections.abc import Mapping

from common.errors import InvalidRequest

# Stands for all fields that lead to a grammar.
GRAMMAR = "the grammar"


def nothing_left(used: Mapping[str, bool]) -> InvalidRequest | None:
    """Return the error that lists the fields that forbid tokens; None if there are none.

    `used` says of each field, or of `GRAMMAR`, whether it forbids tokens.
    """
    fields = [name for name, forbids in used.items() if forbids]
    if not fields:
        return None
    verb = "together forbid" if len(fields) > 1 else "forbids"
    return InvalidRequest(
        f"no token is left that could come next: {_listed(fields)} {verb} all of them",
        param=next((name for name in fields if name != GRAMMAR), None),
    )


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
