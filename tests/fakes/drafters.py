"""Speculative steps over the tiny model, for node tests: the real drafters, and one that is told what to draft."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from common.engine.forward.batch import CaptureHiddenMode
from common.engine.model_runner import ModelRunner
from decode_node.request import DecodeRequest
from decode_node.speculative.drafters.drafter import Drafter, Proposal, Round, Verified
from decode_node.speculative.drafters.ngram import NgramDrafter
from decode_node.speculative.step import SpeculativeStep
from decode_node.speculative.tree import chain, tree
from decode_node.speculative.verifier import Acceptor, ChainAcceptor, TreeAcceptor
from tests.fakes.node_cluster import MakeStep, Parts
from tests.fakes.tiny_model import PLACEMENT, VOCAB, reference


def speculative(
    make_drafter: Callable[[Parts], Drafter],
    make_acceptor: Callable[[ModelRunner], Acceptor] = lambda runner: ChainAcceptor(),
) -> MakeStep:
    def make(parts: Parts) -> SpeculativeStep:
        return SpeculativeStep(
            parts.runner,
            make_drafter(parts),
            make_acceptor(parts.runner),
            parts.table,
            parts.relay,
            parts.page_size,
            PLACEMENT.device,
            parts.completion,
        )

    return make


def ngram(steps: int) -> MakeStep:
    return speculative(lambda parts: NgramDrafter(steps, max_texts=8))


def foresight(hit: float, nodes: int, branch: int) -> MakeStep:
    """Drafts that are right with probability `hit` each: chains (branch 1), or trees of `branch` siblings a level."""
    if branch == 1:
        return speculative(lambda parts: Foresight(hit, nodes, 1))
    depth = (nodes - 1) // branch
    return speculative(
        lambda parts: Foresight(hit, nodes, branch), lambda runner: TreeAcceptor(nodes, depth, (runner.pool,))
    )


class Foresight:
    """Knows what plain decoding would say, whatever the device has drawn that the host has not read yet."""

    needs_results = False
    hidden_mode = CaptureHiddenMode.NULL

    def __init__(self, hit: float, nodes: int, branch: int) -> None:
        self.nodes = self.reach = nodes
        self._hit = hit
        self._branch = branch
        self._random = random.Random(7)

    def propose(self, batch: Round) -> Proposal:
        lengths = batch.seq_len.tolist()  # a test may look at the device
        grown = [self._grow(request, length) for request, length in zip(batch.requests, lengths)]
        drafts = torch.tensor([tokens for tokens, _ in grown]).view(len(grown), -1)
        tokens = torch.cat((batch.last_token[:, None], drafts), dim=1)
        drafted = [self.nodes - 1] * len(grown)
        if self._branch == 1:
            return Proposal(chain(tokens), drafted)
        parents = torch.tensor([parents for _, parents in grown])
        return Proposal(tree(tokens, parents, (self.nodes - 1) // self._branch), drafted)

    def absorb(self, batch: Round, verified: Verified) -> None:
        pass

    def _grow(self, request: DecodeRequest, length: int) -> tuple[list[int], list[int]]:
        told = length + 1 - len(request.prompt)  # tokens drawn so far, the last one without KV
        text = reference(tuple(request.prompt), request.sampling, request.emitted)[0][told:]
        tokens: list[int] = []
        parents = [-1]
        parent, level = 0, 0
        while len(tokens) < self.nodes - 1:
            right = text[level] if level < len(text) else self._random.randrange(VOCAB)
            if self._random.random() > self._hit:
                right = (right + 1 + self._random.randrange(VOCAB - self._branch)) % VOCAB
            siblings = [(right + offset) % VOCAB for offset in range(self._branch)]
            self._random.shuffle(siblings)
            siblings = siblings[: self.nodes - 1 - len(tokens)]
            first = len(tokens) + 1
            tokens += siblings
            parents += [parent] * len(siblings)
            parent = first + (siblings.index(right) if right in siblings else 0)
            level += 1
        return tokens, parents
