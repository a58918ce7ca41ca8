"""How deep a body nests is found in one pass, whatever it is made of, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from router import request_body
from router.request_body import MAX_DEPTH, check_depth

NASTY = st.text(alphabet='[]{}"\\/a', max_size=12)
VALUES = st.recursive(
    st.none() | NASTY, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NASTY, inner, max_size=3)
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(VALUES, st.integers(1, 7), st.integers(0, 4))
def test_the_depth_is_that_of_the_value(value: Any, piece: int, limit: int) -> None:
    """Escapes and strings cut anywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "PIECE", piece)
        patch.setattr(request_body, "MAX_DEPTH", limit)
        checked = check_depth(msgspec.json.encode(value))
        if depth_of(value) <= limit:
            asyncio.run(checked)
            return
        with pytest.raises(InvalidRequest, match=f"more than {limit} arrays"):
            asyncio.run(checked)


SIZE = 1 << 20
HOSTILE = {
    "an open string of escapes": b"[" * MAX_DEPTH + b'"' + rb"\"" * (SIZE // 2),
    "backslashes": b"[" * MAX_DEPTH + b'"' + b"\\" * SIZE,
    "open and shut": b"[" + b"[]," * (SIZE // 3) + b"0]",
    "empty strings": b"[" * MAX_DEPTH + b'"",' * (SIZE // 3),
    "strings of brackets": b"[" + b'"[",' * (SIZE // 4) + b"0]",
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_no_body_holds_the_loop(kind: str) -> None:
    """A backtracking pattern took minutes for the first of them."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    started = time.thread_time()
    await check_depth(HOSTILE[kind])
    assert time.thread_time() - started < 40  # of this thread alone
    assert turns >= len(HOSTILE[kind]) // request_body.PIECE
    beside.cancel()


async def test_deep_bodies_are_refused_wherever_that_shows() -> None:
    for raw in (b"[" * SIZE, b"[" * SIZE + b"]" * SIZE, b"[" + b"[]," * 100_000 + b"[" * MAX_DEPTH):
        with pytest.raises(InvalidRequest, match="more than 64"):
            await check_depth(raw)
