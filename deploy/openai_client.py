"""Calls of an OpenAI-compatible server that several commands make."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec

from common.errors import ConfigError

CONNECT_SECONDS = 5.0
MAX_SENTENCE = 1000  # characters of an error of the server


class Unreachable(Exception):
    """No server answered, or it is not OpenAI-compatible."""


class BadAnswer(Exception):
    """One request failed; the message says how."""


def api_base(url: str) -> str:
    """Return the URL up to and including /v1; `url` may have it or not."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def require_http(url: str) -> None:
    """Raise ConfigError for a URL of another scheme than http and https, or of none."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(url, "is not an http or https URL, such as http://127.0.0.1:8000")


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the headers that present an API key; none without a key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def extra_fields(text: str) -> dict[str, Any]:
    """Return the fields of the JSON object in the option --extra-body. Raises ConfigError."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except ValueError as error:
        raise ConfigError("--extra-body", f"is not a JSON object: {error}") from None


def error_sentence(raw: bytes) -> str:
    """Return what the body of an error says: its sentence, or the body itself if it is in no form that is known."""
    try:
        body = msgspec.json.decode(raw, type=dict[str, Any])
    except ValueError:
        return raw[:MAX_SENTENCE].decode(errors="replace").strip()
    return message_of(body.get("error", body))


def message_of(error: Any) -> str:
    """Return the message of an error object; for any other value, its JSON."""
    found = error
    if isinstance(error, dict):
        found = error.get("message") or error.get("detail")  # FastAPI's name
    text = found if isinstance(found, str) and found else msgspec.json.encode(error).decode()
    return text[:MAX_SENTENCE]


async def call(session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None) -> Any:
    """Return the JSON of an answer with status 200. Raises BadAnswer for anything else."""
    try:
        async with session.request(method, url, json=body) as response:
            raw = await response.read()
            if response.status != 200:
                raise BadAnswer(f"{url} answered {response.status}: {error_sentence(raw)}")
            return json.loads(raw)
    except TimeoutError:
        raise BadAnswer(f"{url} did not answer in time") from None
    except aiohttp.ClientError as error:
        raise BadAnswer(f"cannot reach {url}: {error}") from None
    except ValueError as error:
        raise BadAnswer(f"{url} did not answer with JSON: {error}") from None


async def first_model(session: aiohttp.ClientSession, base: str) -> str:
    """Return the first model that the server lists. `base` ends with /v1. Raises Unreachable."""
    try:
        async with asyncio.timeout(4 * CONNECT_SECONDS):
            reply = await call(session, "GET", f"{base}/models", None)
        return str(reply["data"][0]["id"])
    except TimeoutError:
        raise Unreachable(f"{base}/models did not answer within {4 * CONNECT_SECONDS:.0f} s") from None
    except BadAnswer as error:
        raise Unreachable(str(error)) from None
    except (KeyError, IndexError, TypeError):
        raise Unreachable(f"{base}/models lists no model: is this an OpenAI-compatible server?") from None
