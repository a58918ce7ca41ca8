"""Traces in Mooncake's format: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from deploy.load_generator.trace import TraceRequest, read_trace

# The first lines of the published conversation trace, with shorter prompts.
LINES = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3052, "input_length": 512, "output_length": 26, "hash_ids": [0], "chat_id": 7}\n'
)


def trace(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    return path


def test_requests_are_read_in_order(tmp_path: Path) -> None:
    """Fields that other trace writers add are ignored."""
    first, second = read_trace(trace(tmp_path, LINES + "\n"))
    assert first == TraceRequest(timestamp=0, input_length=1100, output_length=500, hash_ids=(0, 1, 2))
    assert second == TraceRequest(timestamp=3052, input_length=512, output_length=26, hash_ids=(0,))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{}", "missing required field `timestamp`"),
        ("[1", "is not a request"),
        (
            '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}',
            "input_length must be at least 1",
        ),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "at least 0"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "2 blocks of 512, not 1",
        ),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}', "hash_ids"),
    ],
)
def test_a_line_that_is_refused_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = trace(tmp_path, "\n" + line + "\n")
    with pytest.raises(ConfigError) as caught:
        list(read_trace(path))
    assert f"{path}:2" in str(caught.value)
    assert problem in str(caught.value)


def test_times_must_not_go_back(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r":3: arrives before the line above; sort by timestamp"):
        list(read_trace(trace(tmp_path, LINES + LINES[: LINES.index("\n") + 1])))


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.jsonl: cannot be read: No such file"):
        list(read_trace(tmp_path / "nothing.jsonl"))
