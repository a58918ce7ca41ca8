"""Random bytes that are fetched in blocks."""

from __future__ import annotations

import os

from common.random_bytes import BLOCK, random_bits, random_bytes, random_hex


def test_no_byte_is_given_out_twice_over_several_blocks() -> None:
    found = [random_bytes(16) for _ in range(4 * BLOCK // 16)]
    assert {len(each) for each in found} == {16}
    assert len(set(found)) == len(found)


def test_sizes() -> None:
    assert max(random_bits(63) for _ in range(200)).bit_length() == 63
    assert max(random_bits(1) for _ in range(200)) == 1
    assert len(random_hex(12)) == 24


def test_a_fork_does_not_repeat_what_its_parent_gives_out() -> None:
    random_bytes(1)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, random_bytes(16))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 16) != random_bytes(16)
    os.close(reading)
    os.close(writing)
