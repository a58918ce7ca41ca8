"""Reads the file of hashed API keys: a YAML or JSON list with one entry per key, readable by its owner only."""

from __future__ import annotations

import os
import stat
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import msgspec

from common.api_key import ApiKey
from common.config.yaml_file import parse_yaml
from common.errors import ConfigError

KEY = "security.api_keys"
MAX_BYTES = 1 << 19
MAX_KEYS = 1000  # each request is compared with all of them


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys. Raises ConfigError with the file, the entry and the remedy. An explicit [] admits nobody."""
    entries = _list_in(_read(path), path)
    if len(entries) > MAX_KEYS:
        raise ConfigError(
            KEY, f"{path} has {len(entries)} keys, at most {MAX_KEYS} are supported; remove some"
        )
    keys: list[ApiKey] = []
    for index, entry in enumerate(entries):
        try:
            keys.append(msgspec.convert(_with_times(entry), ApiKey))
        except msgspec.ValidationError as error:
            raise ConfigError(KEY, f"{path}, entry {index + 1}: {error}") from error
    for name in ("id", "sha256"):
        values = [getattr(key, name) for key in keys]
        twice = next((value for at, value in enumerate(values) if value in values[:at]), None)
        if twice is not None:
            raise ConfigError(KEY, f"{path}: two entries have the {name} {twice}; remove one")
    return tuple(keys)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(KEY, f"{path} is not a file")
            if mode & 0o077:
                raise ConfigError(KEY, f"{path} can be read by other users; run chmod 600 on it")
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            KEY, f"cannot read {path}: {error.strerror}; make it with deploy/api_key"
        ) from error
    if len(data) > MAX_BYTES:
        raise ConfigError(KEY, f"{path} has more than {MAX_BYTES} bytes: not a file of API keys")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(KEY, f"{path} is not text: {error}") from error


def _list_in(text: str, path: Path) -> list[Any]:
    try:
        data = parse_yaml(text, str(path))
    except ConfigError as error:
        raise ConfigError(KEY, str(error)) from error
    if not isinstance(data, list):
        raise ConfigError(
            KEY, f"{path} must contain a list of keys (or [] to admit nobody); see deploy/api_key"
        )
    return data


def _with_times(entry: Any) -> Any:
    """Return the entry with `expires` as a time in UTC: YAML may parse it as a date or as a time without a zone."""
    expires = entry.get("expires") if isinstance(entry, dict) else None
    if isinstance(expires, datetime):
        return {**entry, "expires": expires if expires.tzinfo else expires.replace(tzinfo=UTC)}
    if isinstance(expires, date):
        return {**entry, "expires": datetime(expires.year, expires.month, expires.day, tzinfo=UTC)}
    return entry
