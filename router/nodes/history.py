"""Keeps the facts learned from requests by which placement predicts: prefixes, sessions and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from common.kv_cache.block_hashes import BlockChain, chain_start, token_bytes
from common.messages.generation import ImageSpan
from common.messages.identity import Role
from router.nodes.measured_steps import MeasuredSteps
from router.nodes.measured_transfers import MeasuredTransfers
from router.nodes.placed_prompt import PlacedPrompt
from router.nodes.placement import EventPolicy, PlacementPolicy, PrefixPolicy
from router.nodes.placement_rules import PlacementRules
from router.nodes.prefix_index import PLACED, NodeBits, PrefixIndex, PrefixMatches
from router.nodes.registry import Node
from router.nodes.reported_blocks import ReportedBlocks
from router.nodes.session_nodes import SessionNodes

NO_MATCHES = PrefixMatches(NodeBits())
# Seconds after its placement for which a prompt counts as held by a node that publishes KV events but has not named it.
UNCONFIRMED_SECONDS = 10.0


class ExpectedCache(NamedTuple):
    """Tokens of one prompt that its two nodes are believed to hold."""

    prefill: int
    decode: int


NOTHING_CACHED = ExpectedCache(0, 0)


class PlacementHistory:
    """The history of all requests, as far as placement uses it. Used on the event loop only."""

    def __init__(
        self,
        rules: PlacementRules,
        policies: Mapping[Role, PlacementPolicy],
        clock: Callable[[], float],
    ) -> None:
        self.rules = rules
        readers = [role for role, policy in policies.items() if isinstance(policy, PrefixPolicy)]
        self._indexes = {
            role: PrefixIndex(rules.index_bytes // len(readers), rules.prefix_ttl, clock) for role in readers
        }
        self.reported = ReportedBlocks(
            {role: self._indexes[role] for role in readers if isinstance(policies[role], EventPolicy)},
            rules.block_tokens,
        )
        self.reads_prefixes = bool(self._indexes)  # some policy asks for the blocks of prompts
        self.sessions = SessionNodes(rules.session_ttl, clock)
        self.transfers = MeasuredTransfers()
        self.steps = MeasuredSteps()

    @property
    def blocks(self) -> int:
        """Return the number of blocks that are known, of all nodes."""
        return sum(map(len, self._indexes.values()))

    def prompt(
        self, token_ids: Sequence[int], salt: bytes, images: Sequence[ImageSpan], session: bytes
    ) -> PlacedPrompt:
        """Return a prompt with the hashes of its blocks, if a policy reads them."""
        chain = chain_start(salt)
        if self._indexes:
            chain = chain.extended(token_bytes(token_ids, images), self.rules.block_tokens)
        return PlacedPrompt(len(token_ids), chain, bool(images), session)

    def matches(self, role: Role, prompt: PlacedPrompt) -> PrefixMatches:
        """Return which nodes of a role are believed to hold parts of the prompt."""
        index = self._indexes.get(role)
        return NO_MATCHES if index is None else index.match(prompt.blocks.hashes)

    def cached_tokens(self, matches: PrefixMatches, node: Node, prompt: PlacedPrompt) -> int:
        """Return the tokens of a prompt that a node is believed to hold; its last token is always computed."""
        return max(min(matches.blocks(node.incarnation) * self.rules.block_tokens, prompt.tokens - 1), 0)

    def placed(self, prompt: PlacedPrompt, prefill: Node, decode: Node) -> ExpectedCache:
        """Note that a request was placed on these nodes; return what they are believed to have held before."""
        self.sessions.placed(prompt.session, prefill.incarnation, decode.incarnation)
        if not prompt.blocks.hashes:
            return NOTHING_CACHED
        held = {"prefill": 0, "decode": 0}
        for node in (prefill, decode):
            if self._caches(node):
                held[node.role] = self.cached_tokens(self.matches(node.role, prompt), node, prompt)
                self.reported.used(node, prompt.blocks.hashes)
                self._add(node, prompt.blocks)
        return ExpectedCache(held["prefill"], held["decode"])

    def answered(self, prompt: PlacedPrompt, token_ids: Sequence[int], decode: Node) -> None:
        """Note that a decode node holds the pages of a finished answer. `token_ids`: prompt and answer."""
        size = self.rules.block_tokens
        whole = len(prompt.blocks.hashes) * size
        hashed = whole == prompt.tokens // size * size
        if hashed and decode.lost_by is None and self._caches(decode):
            added = token_bytes(token_ids[whole:])
            self._add(decode, prompt.blocks.extended(added, size))

    def lost(self, node: Node) -> None:
        """Forget a node."""
        self.transfers.forget(node.incarnation)
        self.reported.lost(node)
        for index in self._indexes.values():
            index.forget(node.incarnation)

    def flushed(self) -> None:
        """Note that all nodes empty their caches; those that publish events say themselves what is left."""
        for index in self._indexes.values():
            index.clear(PLACED)

    def _caches(self, node: Node) -> bool:
        """Return whether the node has a prefix cache that its role's policy asks for."""
        reported = str(node.register.effective_config.get("prefix_cache", "on"))
        off = node.role in self.rules.uncached or reported.startswith("off")
        return node.role in self._indexes and not off

    def _add(self, node: Node, blocks: BlockChain) -> None:
        pool = node.register.total_pages * node.register.page_size
        # What the pool has is in host memory, too.
        kept = max(pool, node.load.host_total_tokens)
        ttl = UNCONFIRMED_SECONDS if node.incarnation in self.reported.following else None
        most = kept // self.rules.block_tokens
        self._indexes[node.role].add(node.incarnation, blocks.hashes, most, ttl=ttl)
