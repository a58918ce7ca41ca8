"""The exception tree and the docstring that draws it."""

from __future__ import annotations

import re

import pytest

from common import errors
from common.errors import (
    BY_CODE,
    ConfigError,
    InternalError,
    InvalidRequest,
    RecordError,
    RequestError,
    from_code,
)


def drawn() -> dict[str, int]:
    """Name -> HTTP status, parsed from the module's docstring."""
    text = errors.__doc__ or ""
    return {name: int(status) for name, status in re.findall(r"\+-- (\w+) +(\d{3}) ", text)}


def request_errors() -> dict[str, type[RequestError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, RequestError) and value is not RequestError
    }


def test_the_docstring_draws_every_class() -> None:
    text = errors.__doc__ or ""
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.TandemError):
            assert re.search(rf"\b{name}\b", text), name
            assert value.__doc__


def test_status_of_every_request_error() -> None:
    assert drawn() == {name: cls.status for name, cls in request_errors().items()}


def test_every_code_is_one_class() -> None:
    assert sorted(cls.__name__ for cls in BY_CODE.values()) == sorted(request_errors())
    for code, cls in BY_CODE.items():
        assert cls.code == code
        rebuilt = from_code(code, "a sentence")
        assert type(rebuilt) is cls
        assert str(rebuilt) == "a sentence"


def test_what_the_client_can_correct_is_an_invalid_request() -> None:
    for cls in request_errors().values():
        assert (cls.type == "invalid_request_error") == (cls.status in (400, 401, 403, 404, 409, 413, 415)), (
            cls
        )
        assert not (cls.retryable and cls.status != 503), cls


def test_a_code_from_a_newer_node_is_an_internal_error_here() -> None:
    error = from_code("something_new", "text")
    assert type(error) is InternalError
    assert error.status == 500


@pytest.mark.parametrize(("path", "text"), [("a.b", "a.b: no"), ("", "no")])
def test_config_error_names_its_key(path: str, text: str) -> None:
    error = ConfigError(path, "no")
    assert (error.path, str(error)) == (path, text)


def test_an_error_carries_its_details() -> None:
    assert InvalidRequest("x", param="top_p").param == "top_p"
    assert InvalidRequest("x").param is None
    assert RecordError("crc", "x").cause == "crc"
