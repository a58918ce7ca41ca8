"""Hashes of the whole blocks of a prompt: equal hashes mean equal tokens from the start of the prompt, and equal salts.

Each block's hash is made from the hash of the block before it and from its own tokens; the first one's predecessor
follows from the salt. Prompts with different salts therefore have no hash in common. Routers and nodes compute the same
hashes, in every process and after every restart, from plain bytes: nothing is pickled.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.messages.generation import ImageSpan

TOKEN_BYTES = 4
_START = b"tandem block hashes 1\0"


@dataclass(frozen=True, slots=True)
class BlockChain:
    """The hashes of a prompt's whole blocks, and what is needed to continue them."""

    hashes: tuple[int, ...]  # 64 bits each
    digest: bytes  # of the last whole block

    def extended(self, tokens: bytes, block_tokens: int) -> BlockChain:
        """Return the chain with the whole blocks of `tokens`, int32 in little-endian order, added to it."""
        size, digest = block_tokens * TOKEN_BYTES, self.digest
        view = memoryview(tokens)
        added: list[int] = []
        for end in range(size, len(view) + 1, size):
            block = hashlib.sha256(digest)
            block.update(view[end - size : end])
            digest = block.digest()
            added.append(int.from_bytes(digest[-8:], "big"))
        return BlockChain(self.hashes + tuple(added), digest)


def chain_start(salt: bytes = b"") -> BlockChain:
    """Return the chain of an empty prompt."""
    return BlockChain((), hashlib.sha256(_START + salt).digest())


def token_bytes(token_ids: Iterable[int], images: Sequence[ImageSpan] = ()) -> bytes:
    """Return [n] int32 as little-endian bytes; rows of images are the low 32 bits of their keys (image_keys.py).

    Raises OverflowError for ids that do not fit.
    """
    ids = array("i", token_ids)
    for image in images:
        rows = array("i", hashlib.shake_256(image.digest).digest(image.length * 2 * TOKEN_BYTES))
        ids[image.offset : image.offset + image.length] = rows[::2]
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
