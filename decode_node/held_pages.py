"""The pages of a retracted request that are kept in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.kv_cache.host_cache import HostPrefix


@dataclass(slots=True, eq=False)
class HeldPages:
    """The pages of a retracted request in host memory; call `DecodeTier.free_retracted` exactly once."""

    num_pages: int
    nbytes: int  # of blocks of its own
    prefix: HostPrefix | None  # what was there already, and is locked
    blocks: Sequence[int]  # its own, for the pages after the prefix
    storing: bool = True
    fetching: bool = False
    dropped: bool = False
