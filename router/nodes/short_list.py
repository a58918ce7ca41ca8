"""Narrows a sample of nodes down to the few that may cost least for a prompt, so that only these are compared.

Comparing a node takes as long as a part of the request itself, so it must not be done for each node of a sample. These
estimates read values that the nodes' rooms and heartbeats keep up to date. They leave out what rarely decides: a short
prompt takes more time per token, and holders of less than the longest prefixes save time, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.messages.identity import Role
from router.nodes.history import PlacementHistory
from router.nodes.placed_prompt import PlacedPrompt
from router.nodes.placement import missing_pages
from router.nodes.prefix_index import PrefixMatches
from router.nodes.prompt_times import prompt_ms
from router.nodes.registry import Node, NodeRegistry

LONGEST_MATCHES = 4  # nodes with the longest cached prefixes that are estimated beside a sample
# Whether a node that is not in the sample may get the request.
Accepts = Callable[[Node], bool]
# Share of another node's estimate below which the difference is more than an error of estimates.
CLEARLY = 0.8


def any_node(node: Node) -> bool:
    """Return True: the request may go to any node."""
    return True


class ShortLists:
    """The nodes that are worth a comparison: the best of a sample, and the best of known ones, which
    have the longest prefixes or the prompt's session.

    The first is left out if the second is clearly better. Of nodes of a sample with equal estimates the first one
    counts, so samples have to begin anywhere.
    """

    def __init__(self, registry: NodeRegistry, history: PlacementHistory) -> None:
        self._registry = registry
        self._history = history
        self._block_tokens = history.rules.block_tokens
        self._imbalance_ms = history.rules.max_imbalance_ms
        self._session_ms = history.rules.session_ms
        self._turn = 0  # with which bits the search for holders begins

    def prefill(
        self,
        sample: Sequence[Node],
        matches: PrefixMatches,
        prompt: PlacedPrompt,
        session_nodes: Sequence[str],
        accepts: Accepts,
    ) -> list[Node]:
        """Return one or two prefill nodes. `session_nodes`: incarnations of the nodes of the prompt's session."""
        tokens = prompt.tokens
        waits = [node.rooms.ms + tokens * node.token_ms for node in sample]
        of_sample = best = sample[waits.index(min(waits))]
        known = self._known("prefill", matches, session_nodes, accepts)
        if not known:
            return [of_sample]
        # Tokens of long prompts take more time than `token_ms`, so more is saved of them.
        alone = prompt_ms(of_sample.load.prompt_times, tokens)
        scale = alone / (tokens * of_sample.token_ms) if tokens and of_sample.token_ms else 1.0
        least = best_ms = of_sample.rooms.ms + alone
        longest = of_sample.rooms.ms + self._imbalance_ms
        for node, cached in known:
            wait = node.rooms.ms + (tokens - cached) * node.token_ms * scale
            if session_nodes and node.incarnation in session_nodes:
                wait -= self._session_ms
            if wait < best_ms and node.rooms.ms <= longest:
                best, best_ms = node, wait
            if not node.rooms.tokens:
                break  # idle: those that hold less are hardly better
        return [best] if best is of_sample or best_ms < CLEARLY * least else [of_sample, best]

    def decode(
        self,
        sample: Sequence[Node],
        matches: PrefixMatches,
        prompt: PlacedPrompt,
        session_nodes: Sequence[str],
        prefill: Node,
        accepts: Accepts,
    ) -> Sequence[Node]:
        """Return one or two decode nodes for a prompt that is computed on `prefill`.

        If a pool has no room for it, the estimates do not count and the whole sample is returned.
        """
        tokens, each = prompt.tokens, self._history.steps.time.each
        transfers = self._history.transfers
        rates, average = transfers.rates(prefill.incarnation), transfers.average
        costs = [
            node.answer_steps * each * node.rooms.requests + tokens * rates.get(node.incarnation, average)
            for node in sample
        ]
        least = min(costs)
        of_sample = best = sample[costs.index(least)]
        best_ms = least
        for node, cached in self._known("decode", matches, session_nodes, accepts):
            moved_ms = (tokens - cached) * rates.get(node.incarnation, average)
            cost = node.answer_steps * each * node.rooms.requests + moved_ms
            if session_nodes and node.incarnation in session_nodes:
                cost -= self._session_ms
            if cost < best_ms:
                best, best_ms = node, cost
        if _lacks_pages(of_sample, tokens) or (best is not of_sample and _lacks_pages(best, tokens)):
            return sample
        return [best] if best is of_sample or best_ms < CLEARLY * least else [of_sample, best]

    def _known(
        self, role: Role, matches: PrefixMatches, session_nodes: Sequence[str], accepts: Accepts
    ) -> Sequence[tuple[Node, int]]:
        """Return the node of the session, if it can take requests, then those of `holders`."""
        holders = self.holders(matches, accepts)
        for node in self._registry.eligible_among(role, session_nodes) if session_nodes else ():
            if accepts(node):
                return [(node, matches.blocks(node.incarnation) * self._block_tokens), *holders]
        return holders

    def holders(self, matches: PrefixMatches, accepts: Accepts) -> list[tuple[Node, int]]:
        """Return nodes that hold a part of the prompt, and how many tokens; those with the longest parts first.

        A node of which several sources know may be there twice.
        """
        found: list[tuple[Node, int]] = []
        get, names, size = self._registry.get, matches.nodes.names, self._block_tokens
        for nodes, blocks in reversed(matches.ends):
            if nodes.bit_count() > LONGEST_MATCHES:
                # Others each time: all of them may hold a popular prefix.
                self._turn += 1
                first = self._turn % nodes.bit_length()
                nodes = nodes >> first << first
            while nodes:
                bit = nodes & -nodes
                nodes ^= bit
                node = get(names[bit])
                if node is not None and node.state == "up" and node.reachable and accepts(node):
                    found.append((node, blocks * size))
                    if len(found) == LONGEST_MATCHES:
                        return found
        return found


def _lacks_pages(node: Node, tokens: int) -> bool:
    """Return whether a prompt may have to wait for pages of a decode node."""
    return missing_pages(node.load, tokens / node.register.page_size) > 0
