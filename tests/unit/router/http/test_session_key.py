"""The header or field that keeps a conversation on its nodes."""

from __future__ import annotations

import pytest

from router.http.client import Client, View, session_key

ALICE, BOB = Client("alice", View.SERVICE), Client("bob", View.SERVICE)


@pytest.mark.parametrize("headers", [{}, {"X-Session-Id": ""}, {"X-Session-Id": "  "}, {"X-Request-Id": "1"}])
def test_without_the_header_there_is_no_session(headers: dict[str, str]) -> None:
    assert session_key(ALICE, headers) == b""


def test_the_body_counts_before_the_header() -> None:
    key = session_key(ALICE, {"X-Session-Id": "1"})
    assert session_key(ALICE, {"X-Session-Id": "2"}, "1") == key
    for empty in ("", " ", None):
        assert session_key(ALICE, {"X-Session-Id": "1"}, empty) == key


def test_a_session_belongs_to_one_client() -> None:
    key = session_key(ALICE, {"X-Session-Id": "1"})
    assert key == session_key(ALICE, {"X-Session-Id": " 1 ", "X-Session-Token": "2"})
    assert key == session_key(ALICE, {"X-Session-Token": "1"})
    assert len({key, session_key(ALICE, {"X-Session-Id": "2"}), session_key(BOB, {"X-Session-Id": "1"})}) == 3
    assert len(key) == 16
