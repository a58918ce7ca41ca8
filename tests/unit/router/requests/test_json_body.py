"""Bodies: how deep they nest is found in one pass, and whole numbers are integers however they are written."""

from __future__ import annotations

import re
import time
import tracemalloc
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from router.requests import json_body
from router.requests.json_body import MAX_DEPTH, check_depth, decode_json

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
    """This holds wherever escapes and strings are split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "PIECE", piece)
        patch.setattr(json_body, "MAX_DEPTH", limit)
        raw = msgspec.json.encode(value)
        if depth_of(value) <= limit:
            check_depth(raw)
            return
        with pytest.raises(InvalidRequest, match=f"more than {limit} levels"):
            check_depth(raw)


SIZE = 1 << 20
HOSTILE = {
    "an open string of escapes": b"[" * MAX_DEPTH + b'"' + rb"\"" * (SIZE // 2),
    "backslashes": b"[" * MAX_DEPTH + b'"' + b"\\" * SIZE,
    "open and shut": b"[" + b"[]," * (SIZE // 3) + b"0]",
    "empty strings": b"[" * MAX_DEPTH + b'"",' * (SIZE // 3),
    "strings of brackets": b"[" + b'"[",' * (SIZE // 4) + b"0]",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_check_takes_one_pass(kind: str) -> None:
    """A backtracking pattern would take minutes for the first of these bodies."""
    started = time.thread_time()
    check_depth(HOSTILE[kind])
    assert time.thread_time() - started < 40


def test_deep_bodies_are_refused_wherever_that_shows() -> None:
    for raw in (b"[" * SIZE, b"[" * SIZE + b"]" * SIZE, b"[" + b"[]," * 100_000 + b"[" * MAX_DEPTH):
        for body in (raw, bytearray(raw)):
            with pytest.raises(InvalidRequest, match="more than 64"):
                check_depth(body)


class Inner(msgspec.Struct):
    limit: int


class Body(msgspec.Struct):
    count: int
    inner: Inner | list[Inner] | None = None
    ids: list[int] = []
    share: float = 0.0


@pytest.mark.parametrize(("text", "count"), [("16.0", 16), ("-3.00", -3), ("1e+05", 100_000), ("1.5E1", 15)])
def test_a_whole_number_is_an_integer_however_it_is_written(text: str, count: int) -> None:
    """Programs in Lua, PHP and R write 16.0 and 1e+05, and other servers take them."""
    raw = f' {{"count" : {text} , "inner": {{"limit": {text}}}, "share": 0.5}}'.encode()
    assert decode_json(raw, msgspec.json.Decoder(Body)) == Body(count, Inner(count), share=0.5)
    raw = f'{{"count": 1, "inner": [{{"limit": 7}}, {{"limit": {text}}}], "ids": [{text},2]}}'.encode()
    expected = Body(1, [Inner(7), Inner(count)], [count, 2])
    assert decode_json(raw, msgspec.json.Decoder(Body)) == expected


def test_long_lists_take_no_memory_for_their_items() -> None:
    """An object for each of a prompt's token ids would take forty times the bytes of the body."""
    raw = b'{"count": 1.0, "ids": [%b]}' % b",".join([b"1"] * SIZE)
    tracemalloc.start()
    try:
        assert decode_json(raw, msgspec.json.Decoder(Body)) == Body(1, ids=[1] * SIZE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(raw)


def test_long_lists_are_not_searched_for_whole_numbers() -> None:
    with pytest.raises(InvalidRequest, match="Expected `int`, got `float`"):
        decode_json(b'{"count": 1, "ids": [%b2.0]}' % (b"1," * 128), msgspec.json.Decoder(Body))


@pytest.mark.parametrize("text", ["1.5", "1e-3", "1e99", "9007199254740993.0", "true"])
def test_other_numbers_are_refused_where_integers_belong(text: str) -> None:
    with pytest.raises(InvalidRequest, match="count: Expected `int`") as refusal:
        decode_json(f'{{"count": {text}, "share": 2.0}}'.encode(), msgspec.json.Decoder(Body))
    assert refusal.value.param == "count"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (
            b'{"a": 1, "temperature": NaN}',
            'byte 24 after "temperature": JSON has no NaN or Infinity; send a number',
        ),
        (b'{"temperature": -Infinity}', 'after "temperature": JSON has no NaN or Infinity'),
        (b'{"a": {"b": [1, nan]}}', 'after "b": JSON has no NaN or Infinity'),
        (b'{"stream": True}', 'after "stream": JSON has null, true and false'),
        (b'{"prompt": "a\nb"}', 'after "prompt": control characters in texts are escaped'),
        (rb'{"prompt": "x\ud800"}', r'byte 13 after "prompt": \ud800 is half of a character'),
        (rb'{"prompt": "x\ud800 and more"}', r"\ud800 is half of a character"),
        (rb'{"prompt": "\\\udc00 and more"}', r"\udc00 is half of a character"),
        (rb'{"prompt": "\ud83d\ude42 \\ud800', "it ends too early; send all of it"),
        (b'{"prompt": "x"', 'byte 14 after "prompt": it ends too early'),
        (b'{"prompt": "\xe9"}', 'byte 12 after "prompt": it is not encoded in UTF-8'),
        (b'{"prompt": "x"}{}', "something follows its JSON object; send one object"),
        (b"{'prompt': 'x'}", "byte 1: object keys must be strings; encode the body with a JSON library"),
        (b" \n", "the body is empty; send a JSON object"),
        # What stands near the place is not what is wrong.
        (b'{"a": 1 "nan_policy": 2}', "byte 8 after \"a\": expected ',' or '}'; encode the body"),
        (rb'{"a": "x nan\q"}', "invalid escape character in string; encode the body"),
        (b'{"a": no, "nan": 1}', 'after "a": invalid character; encode the body'),
        (b'{"a": [1, -nan]}', 'after "a": JSON has no NaN or Infinity'),
    ],
)
def test_a_body_that_is_not_json_is_refused_with_the_place_and_the_remedy(raw: bytes, says: str) -> None:
    for body in (raw, bytearray(raw)):
        with pytest.raises(InvalidRequest) as refusal:
            decode_json(body, msgspec.json.Decoder(dict[str, Any]))
        assert says in str(refusal.value)


@given(st.binary(min_size=1, max_size=8), st.integers(0, 60))
def test_bytes_in_a_body_never_cause_another_error(added: bytes, place: int) -> None:
    body = rb'{"messages": [{"content": "\ud83d\ude42 \n"}], "temperature": 1.5}'
    try:
        said = str(decode_json(body[:place] + added + body[place:], msgspec.json.Decoder(dict[str, Any])))
    except InvalidRequest as refusal:
        said = str(refusal)
    assert said.startswith(("{", "the body is not valid", "["))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_refused_by_its_name(encoding: str) -> None:
    """Older versions of PowerShell write files so."""
    raw = "\ufeff{}".encode(encoding) if encoding == "utf-16-be" else "{}".encode(encoding)
    with pytest.raises(InvalidRequest, match="UTF-16; send JSON in UTF-8"):
        decode_json(raw, msgspec.json.Decoder(dict[str, int]))


class Switch(msgspec.Struct):
    kind: Literal["enabled", "disabled"]
    level: Literal[1, 2] | None = None


class Switched(msgspec.Struct):
    first: Switch | None = None
    several: list[Switch] = []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"first": {"kind": "on"}}', "first.kind: Invalid enum value 'on'; send disabled or enabled"),
        (b'{"first": {"kind": "enabled", "level": 3}}', "first.level: Invalid enum value 3; send 1 or 2"),
        (
            b'{"several": [{"kind": "on"}]}',
            "several[0].kind: Invalid enum value 'on'; send disabled or enabled",
        ),
    ],
)
def test_a_value_out_of_a_set_is_refused_with_the_set(body: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(said)}$"):
        decode_json(body, msgspec.json.Decoder(Switched))


def test_a_byte_order_mark_is_refused_by_its_name() -> None:
    """Editors of Windows write it in front of UTF-8."""
    with pytest.raises(InvalidRequest, match="begins with a byte order mark; send JSON in UTF-8 without one"):
        decode_json('{"a": 1}'.encode("utf-8-sig"), msgspec.json.Decoder(dict[str, int]))
