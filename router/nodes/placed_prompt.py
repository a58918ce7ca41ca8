"""The facts about a request that placement considers."""

from __future__ import annotations

import msgspec

from common.kv_cache.block_hashes import BlockChain, chain_start

EMPTY_CHAIN = chain_start()


class PlacedPrompt(msgspec.Struct, frozen=True):
    """A prompt that is to be placed."""

    tokens: int = 0
    blocks: BlockChain = EMPTY_CHAIN  # its whole blocks; empty if no policy asks for them
    images: bool = False  # it has any
    session: bytes = b""  # the conversation that it belongs to; b"" if the client names none


NO_PROMPT = PlacedPrompt()
