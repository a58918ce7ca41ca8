"""Host memory together with a radix tree of the device against a model of the bytes in every block and slot.

Prompts arrive, are looked up in both, computed, committed and stored in any order; writes end late, bytes change, and
both tiers are flushed. The model knows which prefix is in each block: what is found is always the prefix that was asked
for, under its salt. Nothing that was changed is found again after a comparison, which comes once a prompt has read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.kv_cache.host_cache import HostCache, HostPrefix, HostWrite
from common.kv_cache.page_space import PageLease, PageSpace, as_keys
from common.kv_cache.radix_cache import RadixCache

SALTS = [b"", b"tenant"]
TEXTS = [[0] * 12, [0] * 5 + [1] * 7, [1] * 12]  # two of them share a prefix
TOKENS = st.builds(lambda text, length: text[:length], st.sampled_from(TEXTS), st.integers(4, 12))
Content = tuple[bytes, tuple[int, ...]]  # salt and the tokens from the first to the last of the block


@dataclass
class Prompt:
    """A request that holds pages, and what it reads from host memory."""

    tokens: list[int]
    salt: bytes
    lease: PageLease
    prefix: HostPrefix | None


@dataclass
class Writing:
    """A write whose copies have not ended."""

    write: HostWrite
    blocks: dict[int, int] = field(default_factory=dict)
    flushed: bool = False  # it began before a flush


class HostMachine(RuleBasedStateMachine):
    """See the module docstring."""

    @initialize(
        page_size=st.integers(1, 2),
        block_pages=st.integers(1, 2),
        slots=st.sampled_from([0, 0, 2]),
        spare=st.sampled_from([0, 0, 2]),
    )
    def start(self, page_size: int, block_pages: int, slots: int, spare: int) -> None:
        self.size, self.block = page_size, page_size * block_pages
        self.keeps_state = slots > 0
        self.cache = HostCache(self.block, num_blocks=5, num_slots=slots, spare_blocks=spare)
        self.spare = spare
        self.space = PageSpace(page_size, 41, RadixCache(page_size))
        self.bytes: dict[int, Content] = {}  # block -> what it holds
        self.states: dict[int, Content] = {}  # slot -> the state that it holds
        self.changed: set[int] = set()  # blocks whose bytes are wrong
        self.changed_slots: set[int] = set()
        self.gone: set[int] = set()  # blocks that must not be found: known to be wrong, or flushed
        self.gone_slots: set[int] = set()
        self.known: set[int] = set()  # blocks that were reported as changed, and not written since
        self.held: list[Prompt] = []
        self.writing: list[Writing] = []
        self.holding: list[list[int]] = []  # blocks outside of the tree

    def content(self, salt: bytes, tokens: list[int], index: int) -> Content:
        return salt, tuple(tokens[: (index + 1) * self.block])

    @rule(tokens=TOKENS, salt=st.sampled_from(SALTS))
    def serve(self, tokens: list[int], salt: bytes) -> None:
        """A whole prompt, with nothing in between."""
        before, writes = len(self.held), len(self.writing)
        self.arrive(tokens, salt)
        for prompt in self.held[before:]:
            self.computed(prompt)
            self.left(prompt)
        for writing in self.writing[writes:]:
            self.ended(writing)

    @rule(tokens=TOKENS, salt=st.sampled_from(SALTS))
    def begin(self, tokens: list[int], salt: bytes) -> None:
        self.arrive(tokens, salt)

    def arrive(self, tokens: list[int], salt: bytes) -> None:
        keys = as_keys(tokens)
        lease = self.space.lease(keys, self.space.pages_for(len(tokens)), len(tokens), salt)
        if lease is None:
            return
        prefix = self.cache.find(keys, len(tokens), salt)
        prompt = Prompt(tokens, salt, lease, prefix)
        self.held.append(prompt)
        if prefix is None:
            return
        for index, block in enumerate(prefix.blocks):
            assert self.bytes[block] == self.content(salt, tokens, index), "another prefix"
            assert block not in self.gone, "it was dropped"
        if self.keeps_state:
            assert prefix.snapshot is not None
            slot = prefix.snapshot.slot
            assert self.states[slot] == self.content(salt, tokens, len(prefix.blocks) - 1)
            assert slot not in self.gone_slots, "it was dropped"

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        self.computed(data.draw(st.sampled_from(self.held)))

    def computed(self, prompt: Prompt) -> None:
        """What is read from host memory has stayed as it was; the prompt's pages are then stored."""
        self.read(prompt)
        keys = as_keys(prompt.tokens)
        prompt.lease.commit(keys)
        whole = len(prompt.tokens) // self.block
        states = [tokens * self.block for tokens in range(1, whole + 1)] if self.keeps_state else []
        write = self.cache.reserve(keys[: whole * self.block], prompt.salt, states)
        if write is None:
            return
        if write.fresh:
            assert self.cache.available_blocks >= self.spare - self.cache.held_blocks, "none are spare"
        writing = Writing(write)
        for index, block in write.blocks.items():
            writing.blocks[block] = index
            self.bytes[block] = self.content(prompt.salt, prompt.tokens, index)
            self.changed.discard(block)
            self.gone.add(block)
        for tokens, slot in write.states.items():
            self.states[slot] = prompt.salt, tuple(prompt.tokens[:tokens])
            self.changed_slots.discard(slot)
            self.gone_slots.discard(slot)
        self.writing.append(writing)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def end_write(self, data: st.DataObject) -> None:
        self.ended(data.draw(st.sampled_from(self.writing)))

    def ended(self, writing: Writing) -> None:
        self.writing.remove(writing)
        self.cache.commit(writing.write)
        if not writing.flushed:
            self.gone.difference_update(writing.blocks)
            self.known.difference_update(writing.blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.left(data.draw(st.sampled_from(self.held)))

    def left(self, prompt: Prompt) -> None:
        self.held.remove(prompt)
        self.read(prompt)
        prompt.lease.release()

    @rule(blocks=st.sets(st.integers(1, 5)), slots=st.sets(st.integers(1, 2)))
    def change(self, blocks: set[int], slots: set[int]) -> None:
        """Bytes change, but not while they are written: what is stored is summed up as it was computed."""
        writing = {each for write in self.writing for each in write.blocks}
        saving = {each for write in self.writing for each in write.write.states.values()}
        self.changed |= blocks & self.bytes.keys() - writing
        self.changed_slots |= slots & self.states.keys() - saving

    @rule(count=st.integers(0, 5))
    def hold(self, count: int) -> None:
        """Blocks for something else, which replace prefixes that nobody reads."""
        free = 5 - self.cache.cached_blocks - self.cache.writing_blocks - self.cache.held_blocks
        possible = count <= free + self.cache.tree.evictable_pages
        blocks = self.cache.hold(count)
        assert (blocks is not None) == possible
        self.holding += [blocks] if blocks else []
        for block in blocks or ():
            assert block not in {each for held in self.holding[:-1] for each in held}
            self.bytes.pop(block, None)
            self.gone.add(block)

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.cache.give_back(self.holding.pop(data.draw(st.integers(0, len(self.holding) - 1))))

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        self.space.flush()
        for each in self.writing:
            each.flushed = True

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        self.space.check_integrity()
        assert self.cache.writing_blocks == sum(len(each.write.fresh) for each in self.writing)
        assert self.cache.held_blocks == sum(len(each) for each in self.holding)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for prompt in self.held:
            self.read(prompt)
            prompt.lease.release()
        for each in self.writing:
            self.cache.discard(each.write)
        for blocks in self.holding:
            self.cache.give_back(blocks)
        self.cache.check_integrity()
        assert self.cache.writing_blocks == self.cache.held_blocks == 0
        assert self.cache.tree.evictable_pages == self.cache.cached_blocks
        assert self.space.leased_pages == 0

    def read(self, prompt: Prompt) -> None:
        """Compare what the prompt has read, and unlock it."""
        prefix = prompt.prefix
        if prefix is None:
            return
        for index, block in enumerate(prefix.blocks):
            assert self.bytes[block] == self.content(prompt.salt, prompt.tokens, index), "it was replaced"
        slots = set[int]()
        if self.keeps_state:
            assert prefix.snapshot is not None
            state = self.states[prefix.snapshot.slot]
            assert state == self.content(prompt.salt, prompt.tokens, len(prefix.blocks) - 1)
            slots = {prefix.snapshot.slot} & self.changed_slots
        blocks = self.changed.intersection(prefix.blocks)
        new = len(blocks - self.known) + len(slots - self.gone_slots)
        assert self.cache.damage(blocks, slots) == new
        self.gone |= blocks
        self.known |= blocks
        self.gone_slots |= slots
        self.cache.release(prefix)
        prompt.prefix = None


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
