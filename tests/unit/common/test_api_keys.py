"""The file of hashed API keys: what it may contain, and the errors for everything else."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from common.config.api_keys import MAX_KEYS, read_api_keys
from common.errors import ConfigError

HASH = "0123456789abcdef" * 4


def write(directory: Path, text: str, mode: int = 0o600) -> Path:
    file = directory / "keys.yaml"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_all_fields_of_a_key_are_read(tmp_path: Path) -> None:
    text = f"""
- {{id: team-a, sha256: "{HASH}"}}
- id: "7"
  sha256: {HASH[::-1]}
  scopes: [inference, admin]
  expires: 2030-01-02
  requests_per_minute: 60
  tokens_per_minute: 100000
  concurrency: 4
"""
    plain, full = read_api_keys(write(tmp_path, text))
    assert (plain.id, plain.sha256, plain.scopes) == ("team-a", HASH, ("inference",))
    assert plain.expires is plain.requests_per_minute is plain.tokens_per_minute is plain.concurrency is None
    assert full.scopes == ("inference", "admin")
    assert full.expires == datetime(2030, 1, 2, tzinfo=UTC)
    assert (full.requests_per_minute, full.tokens_per_minute, full.concurrency) == (60, 100_000, 4)


@pytest.mark.parametrize(
    "expires", ["2030-01-02T03:04:05", "2030-01-02 03:04:05Z", "2030-01-02T04:04:05+01:00"]
)
def test_times_are_utc_unless_they_say_otherwise(tmp_path: Path, expires: str) -> None:
    (key,) = read_api_keys(write(tmp_path, f"- {{id: a, sha256: '{HASH}', expires: {expires}}}"))
    assert key.expires == datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_json_and_no_keys_at_all(tmp_path: Path) -> None:
    entry = {"id": "a", "sha256": HASH, "expires": "2030-01-02T03:04:05Z"}
    (key,) = read_api_keys(write(tmp_path, json.dumps([entry])))
    assert key.expires == datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert read_api_keys(write(tmp_path, "[]")) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must contain a list"),
        ("keys: []", "must contain a list"),
        ("[", "is not YAML"),
        (f"- {{id: a, sha256: '{HASH[1:]}'}}", "entry 1: .*sha256"),
        (f"- {{id: a, sha256: '{HASH.upper()}'}}", "entry 1: .*sha256"),
        (f"- {{id: 'a b', sha256: '{HASH}'}}", "entry 1: .*id"),
        (f"- {{sha256: '{HASH}'}}", "entry 1: .*`id`"),
        (f"- {{id: a, sha256: '{HASH}', urgency: 1}}", "entry 1: .*unknown field `urgency`"),
        (f"- {{id: a, sha256: '{HASH}', scopes: [root]}}", "entry 1: .*'root'"),
        (f"- {{id: a, sha256: '{HASH}', concurrency: 0}}", "entry 1: .*concurrency"),
        (f"- {{id: a, sha256: '{HASH}', expires: '2030-01-02T03:04:05'}}", "entry 1: .*timezone"),
        ("- 5", "entry 1: "),
        (f"- {{id: a, sha256: '{HASH}'}}\n- {{id: a, sha256: '{HASH[::-1]}'}}", "two entries have the id a"),
        (f"- {{id: a, sha256: '{HASH}'}}\n- {{id: b, sha256: '{HASH}'}}", "two entries have the sha256"),
        ("[" + "5," * (MAX_KEYS + 1) + "]", f"at most {MAX_KEYS}"),
        ("# " + "x" * (1 << 19), "bytes"),
    ],
)
def test_refusals(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_api_keys(write(tmp_path, text))
    assert caught.value.path == "security.api_keys"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        read_api_keys(write(tmp_path, "[]", mode))


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="deploy/api_key"):
        read_api_keys(tmp_path / "none.yaml")
    with pytest.raises(ConfigError):
        read_api_keys(tmp_path)
