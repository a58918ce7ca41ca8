"""The memory through which the ranks of a node exchange rows: every rank has one, which all of their GPUs map.

It begins with the turns of rows, [MAX_ROWS] int32, and an int32 that is not 0 once a program has given up. From
DATA_OFFSET on it has SENDER_BYTES for each rank, to which that rank writes:

- the places of words (`peer_words.py`), [2, MAX_ROWS, PLACE_BYTES];
- from COUNTS_OFFSET on the counts of streamed rows (`peer_rows.py`), [PROGRAMS] int32;
- from STREAM_OFFSET on their places, [PROGRAMS, WINDOW, ROW_BYTES].

The offsets are those of rank 0's part.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MAX_RANKS, MAX_ROWS, ROW_BYTES = 8, 64, 32 << 10
DATA_OFFSET = 4096
WORD_BYTES, DATA_BYTES = 8, 4  # of a word, and of the data in it
PLACE_BYTES = ROW_BYTES // DATA_BYTES * WORD_BYTES
# Polls of the rows between two looks at host memory. They seem to take 15 us each on an H200, one program after another
# (tests/bench/NOTES.md), so ranks that wait for one another would hold each other up if programs looked often.
POLLS_PER_LOOK = 1 << 14
# Programs that share streamed rows: two for each multiprocessor of an H200.
PROGRAMS = 264
WINDOW = 4  # places of a program for rows of one sender; see peer_rows.py
COUNTS_OFFSET = DATA_OFFSET + 2 * MAX_ROWS * PLACE_BYTES
STREAM_OFFSET = COUNTS_OFFSET + 4096
SENDER_BYTES = STREAM_OFFSET + PROGRAMS * WINDOW * ROW_BYTES - DATA_OFFSET


def peer_bytes(ranks: int) -> int:
    """Return the bytes of a rank's memory."""
    return DATA_OFFSET + ranks * SENDER_BYTES


class RankMemories(NamedTuple):
    """The memory of all ranks, as kernels of one rank see it; zeros at first, `peer_bytes` each."""

    # [ranks] int64 on the device: where this rank has mapped the memory of each, its own included
    addresses: Tensor
    # [2] int32 that the host can read and write: 1 + the rank for which a program has given up, 1 + a rank for which
    # nothing may wait any longer
    host: Tensor
    rank: int
    polls: int  # how often a program looks for the others' rows before it gives up and computes nonsense

    def holds(self, rows: Tensor) -> bool:
        """Return whether rows [n, H] fit into the places of words, without half a word at their end."""
        nbytes = rows.shape[1] * rows.itemsize
        return rows.shape[0] <= MAX_ROWS and nbytes <= ROW_BYTES and not nbytes % DATA_BYTES

    def fits(self, x: Tensor) -> bool:
        """Return whether sums of x [..., H] are those of whole rows, however many; longer rows are summed in pieces."""
        return x.shape[-1] * x.itemsize <= ROW_BYTES

    @property
    def polls_per_look(self) -> int:
        """The polls after which a program looks whether the host knows of a lost rank."""
        return POLLS_PER_LOOK
