"""Words in which the ranks of a node send each other rows: device functions of the kernels in `peer_reduce.py`.

Rows travel as words of 64 bits: 32 bits of data, and above them the number of the row's turn, by which the receiver
sees that the word is new (NCCL's LL protocol has such words, too). A GPU writes and reads such a word as a whole, so
neither side needs a fence or a flag that follows the data: a row takes the time of one write over the link, whatever
the number of ranks. It costs twice the bytes, which is why sums of many rows travel otherwise (`peer_rows.py`).

A row has two places per sender, which its turns use alternately. A rank writes to a place again two turns later. Before
that, in the turn between, it received a row from every other rank, whose kernel of the turn before had then ended, and
with it the reads of that place. That holds for each row by itself, however many rows a call has.
"""

from __future__ import annotations

from common.engine.ops.triton_kernel import kernel, tl


@kernel
def first_place(  # type: ignore[no-untyped-def]
    address, turn, row, ROWS: tl.constexpr, PLACE: tl.constexpr, DATA: tl.constexpr
):
    """Return the pointer to the place of a row that rank 0 sends in a turn; rank r's is r * SENDER bytes further."""
    first = DATA + ((turn & 1) * ROWS + row).to(tl.int64) * PLACE
    return tl.multiple_of((address + first).to(tl.pointer_type(tl.int64)), 16)


@kernel
def send_row(  # type: ignore[no-untyped-def]
    addresses_ptr,
    row,
    turn,
    rank,
    data,
    word,
    live,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    PLACE: tl.constexpr,
    DATA: tl.constexpr,
    SENDER: tl.constexpr,
):
    """Write the data of a row, int32 [words], into the memory of every other rank."""
    words = (turn.to(tl.int64) << 32) | (data.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(RANKS):
        places = first_place(tl.load(addresses_ptr + peer), turn, row, ROWS, PLACE, DATA)
        tl.store(places + rank * (SENDER // 8) + word, words, mask=live & (peer != rank))


@kernel
def look_at_row(  # type: ignore[no-untyped-def]
    own,
    row,
    peer,
    turn,
    rank,
    data,
    word,
    live,
    ROWS: tl.constexpr,
    PLACE: tl.constexpr,
    DATA: tl.constexpr,
    SENDER: tl.constexpr,
):
    """Return (the data of the row of a rank, 1 for each of its words that has not arrived and else 0).

    This rank's own row is `data`; its words lie nowhere.
    """
    places = first_place(own, turn, row, ROWS, PLACE, DATA)
    sent = live & (peer != rank)
    found = tl.load(places + peer * (SENDER // 8) + word, mask=sent, other=0, volatile=True)
    missing = sent & ((found >> 32).to(tl.int32) != turn)
    return tl.where(peer == rank, data, found.to(tl.int32)), missing.to(tl.int32)


@kernel
def report_missing(  # type: ignore[no-untyped-def]
    host_ptr,
    own,
    row,
    turn,
    rank,
    data,
    word,
    live,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    PLACE: tl.constexpr,
    DATA: tl.constexpr,
    SENDER: tl.constexpr,
):
    """Tell the host a rank whose row has not arrived, and later programs that they need not wait."""
    for peer in tl.static_range(RANKS):
        _, missing = look_at_row(own, row, peer, turn, rank, data, word, live, ROWS, PLACE, DATA, SENDER)
        if tl.max(missing, axis=0) > 0:
            tl.store(host_ptr, peer + 1)
            tl.store(own.to(tl.pointer_type(tl.int32)) + ROWS, 1)


@kernel
def polls_left(host_ptr, left, LOOK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the polls that are left after one more; none once the host knows of a lost rank."""
    left -= 1
    if left % LOOK == 0:
        left = tl.where(tl.load(host_ptr + 1, volatile=True) == 0, left, 0)
    return left


@kernel
def first_half(data, PAIRS: tl.constexpr, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the float32 of a number of 32 bits, or of the first of a pair of numbers of 16 bits."""
    if PAIRS:
        number = (data & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    else:
        number = data.to(tl.float32, bitcast=True)
    return number


@kernel
def second_half(data, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the float32 of the second of a pair of numbers."""
    return (data >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@kernel
def joined_halves(first, second, PAIRS: tl.constexpr, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return int32 data of float32 numbers, which are rounded to TYPE; without PAIRS of the first one only."""
    if PAIRS:
        low = first.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        data = low | (second.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        data = first.to(tl.int32, bitcast=True)
    return data
