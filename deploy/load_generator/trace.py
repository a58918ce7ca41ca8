"""Request traces in Mooncake's format: JSON lines with arrival time, lengths and the hash ids of the prompt's blocks.

Two prompts share the prefix that their equal leading hash ids cover, at `BLOCK_TOKENS` tokens each. The published
traces are in https://github.com/kvcache-ai/Mooncake, folder FAST25-release.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from common.errors import ConfigError

BLOCK_TOKENS = 512


class TraceRequest(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: float  # milliseconds since the start of the trace
    input_length: int  # tokens of the prompt
    output_length: int  # tokens of the answer
    hash_ids: tuple[int, ...]  # one per block of the prompt; the last block may be partial


_decoder = msgspec.json.Decoder(TraceRequest)


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a trace file, ordered by time. Raises ConfigError naming file, line and remedy."""
    before = 0.0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                request = _parse(line, f"{path}:{number}")
                if request.timestamp < before:
                    raise ConfigError(f"{path}:{number}", "arrives before the line above; sort by timestamp")
                before = request.timestamp
                yield request
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None


def _parse(line: bytes, place: str) -> TraceRequest:
    try:
        request = _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            place, f"is not a request with timestamp, input_length, output_length, hash_ids: {error}"
        ) from None
    if min(request.timestamp, request.output_length, *request.hash_ids) < 0 or request.input_length < 1:
        raise ConfigError(place, "input_length must be at least 1, all other numbers at least 0")
    blocks = -(-request.input_length // BLOCK_TOKENS)
    found = len(request.hash_ids)
    if found != blocks:
        raise ConfigError(
            place,
            f"{request.input_length} tokens have {blocks} blocks of {BLOCK_TOKENS}, not {found} hash_ids",
        )
    return request
