"""The output of a verify round is distributed as the target's softmax, for chains and trees and every parameter.

The target has 20 tokens and its logits depend only on the last token. Thousands of requests have the same text and
different seeds; the exact distribution of the next three tokens comes from enumeration. Seeds are fixed and the bound
is six standard deviations, so nothing here is flaky; wrong distributions show that the test can fail.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from common.engine.forward.batch import ForwardBatch, ForwardOutput
from common.engine.forward.draft_inputs import TreeVerifyInput
from common.engine.layers.logit_rows import LogitRows
from common.engine.sampling.sampling_plan import sampling_variant
from common.engine.state.relay_state import RelayState
from common.messages.generation import SamplingParams
from decode_node.page_table import PageTable
from decode_node.speculative.rounds import RoundCall, Rounds
from decode_node.speculative.state import RoundState
from decode_node.speculative.tree import tree
from decode_node.speculative.verifier import Accepted, Acceptor, ChainAcceptor, TreeAcceptor
from decode_node.speculative.verify import Verify
from tests.fakes.drafters import Foresight, plans
from tests.fakes.tiny_model import adjusted

CPU, VOCAB, ROWS, PAGE = torch.device("cpu"), 20, 3000, 16
TEXT, OUTPUTS = [3, 7, 7, 11, 5, 3, 2], 3  # the same for every request
TABLE = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
LIKELY = TABLE.topk(3).indices  # [V, 3]: drafts
PLAIN = SamplingParams(max_tokens=99)
PARAMS = {
    "softmax": PLAIN,
    "temperature": replace(PLAIN, temperature=0.7),
    "top_k": replace(PLAIN, top_k=5),
    "top_p": replace(PLAIN, top_p=0.8),
    "min_p": replace(PLAIN, min_p=0.15),
    "repetition": replace(PLAIN, repetition_penalty=1.8),
    "presence": replace(PLAIN, presence_penalty=2.0),
    "frequency": replace(PLAIN, frequency_penalty=-2.0),
    "bias": replace(PLAIN, logit_bias=((int(LIKELY[2, 0]), -4.0), (9, 2.5))),
    "min_tokens": replace(PLAIN, min_tokens=5, stop_token_ids=(int(LIKELY[2, 0]), 1, 6)),
}
PARAMS["all"] = replace(
    PARAMS["min_tokens"],
    temperature=1.3,
    top_k=15,
    top_p=0.95,
    min_p=0.02,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias=((9, 1.5), (4, -1.0)),
)


class Markov:
    """A target whose logits depend only on the last token."""

    def __call__(self, batch: ForwardBatch) -> ForwardOutput:
        return ForwardOutput(LogitRows(TABLE[batch.input_ids]))


class Likely(Foresight):
    """Drafts the likeliest tokens of the raw logits: chains, or trees of three branches."""

    def __init__(self, rounds: Rounds, branch: int) -> None:
        self.nodes = self.lookahead_slots = 4 if branch == 1 else 7
        self.depth = 3 if branch == 1 else 2
        self.state = RoundState.allocate(rounds.max_rows, self.nodes, self.depth + 1, CPU)
        self._relay = rounds.relay
        self._branch = branch

    def propose(self, call: RoundCall) -> None:
        last = self._relay.last_token[call.placed[:, 0]]
        first = LIKELY[last]
        if self._branch == 1:
            second = LIKELY[first[:, 0], 0]
            self.state.tree.tokens[: len(last), 1:] = torch.stack((first[:, 0], second, LIKELY[second, 0]), 1)
            return
        tokens = torch.cat((last[:, None], first, LIKELY[first[:, 0]]), 1)
        parents = torch.tensor([-1, 0, 0, 0, 1, 1, 1]).expand(len(last), -1)
        grown = tree(tokens, parents, self.depth)
        for field in ("tokens", "parents", "depth", "mask"):
            getattr(self.state.tree, field)[: len(last)] = getattr(grown, field)


class Gullible(ChainAcceptor):
    """A wrong acceptor that accepts one draft too many."""

    def accept(self, drafts: TreeVerifyInput, drawn: Tensor) -> Accepted:
        accepted = super().accept(drafts, drawn)
        return Accepted(accepted.path, (accepted.drafts + 1).clamp(max=drawn.shape[1] - 1))


def say(sampling: SamplingParams, branch: int, acceptor: Acceptor) -> tuple[Tensor, float]:
    """Return (the next three tokens of every request [ROWS, 3], mean tokens per round)."""
    relay = RelayState.allocate(ROWS, VOCAB, CPU)
    rounds = Rounds(relay, PageTable(ROWS, 4, CPU), PAGE, 32, 7, plans(()))
    relay.write_row(1, TEXT, OUTPUTS, sampling)
    own = relay.adjustments
    for state in (relay, relay.sampling, relay.draft, own, own.penalties, own.bias, own.withheld):
        for field in fields(state):
            value = getattr(state, field.name)
            if isinstance(value, Tensor) and value.numel():
                value[2:] = value[1]
    relay.sampling.seed[1:] = torch.arange(ROWS)
    drafter = Likely(rounds, branch)
    runner: Any = Markov()
    verify = Verify(runner, rounds, drafter, acceptor)
    placed = torch.stack((torch.arange(1, ROWS + 1), torch.full((ROWS,), 4)), 1)
    call, lengths = RoundCall(placed, sampling_variant([sampling])), 0
    said: list[list[int]] = [[] for _ in range(ROWS)]
    for _ in range(3):
        drafter.propose(call)
        sampled, counts = verify(call).read()
        lengths += sum(counts)
        for row, tokens in enumerate(sampled.token_ids.view(ROWS, -1).tolist()):
            said[row] += tokens[: counts[row]]
    return torch.tensor([tokens[:3] for tokens in said]), lengths / (3 * ROWS)


def exact(sampling: SamplingParams, said: tuple[int, ...]) -> Tensor:
    """Return the distribution of the token after TEXT and `said`, [V] float64, derived from `sampling`."""
    text = [*TEXT, *said]
    prompt = len(TEXT) - OUTPUTS
    logits = adjusted(TABLE[text[-1]][None], text[:prompt], text[prompt:], sampling)[0].double()
    probs = (logits / sampling.temperature).softmax(-1)
    probs = torch.where(probs >= sampling.min_p * probs.max(), probs, 0.0)
    order = probs.argsort(descending=True)
    if sampling.top_k:
        probs[order[sampling.top_k :]] = 0.0
    probs = probs / probs.sum()
    before = probs[order].cumsum(-1) - probs[order]
    probs[order[before >= sampling.top_p]] = 0.0
    return probs / probs.sum()


@functools.cache
def joint(name: str) -> Tensor:
    """Return the distribution of the next three tokens, [V, V, V] float64."""
    sampling, out = PARAMS[name], torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    first = exact(sampling, ())
    for one in first.nonzero()[:, 0].tolist():
        second = exact(sampling, (one,))
        for two in second.nonzero()[:, 0].tolist():
            out[one, two] = first[one] * second[two] * exact(sampling, (one, two))
    return out


def distance(said: Tensor, probs: Tensor) -> float:
    """Return by how many standard deviations the worst of three chi-squared values is too high.

    They are those of the first token, of the third, and of the first two together. A token that cannot occur is
    infinitely far.
    """
    tables = [
        (said[:, 0], probs.sum((1, 2))),
        (said[:, 2], probs.sum((0, 1))),
        (said[:, 0] * VOCAB + said[:, 1], probs.sum(2).flatten()),
    ]
    return max(_deviations(torch.bincount(cells, minlength=len(p)).double(), p) for cells, p in tables)


def _deviations(counts: Tensor, probs: Tensor) -> float:
    if counts[probs == 0].any():
        return float("inf")
    expected = probs * counts.sum()
    rare = expected < 5
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    wanted = torch.cat((expected[~rare], expected[rare].sum()[None])).clamp(min=1e-9)
    chi, freedom = float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    scale = 2 / (9 * freedom)  # Wilson and Hilferty: the cube root is nearly normal
    return ((chi / freedom) ** (1 / 3) - (1 - scale)) / scale**0.5


BOUND = 6.0


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("branch", [1, 3], ids=["chain", "tree"])
def test_rounds_follow_the_exact_distribution(branch: int, name: str) -> None:
    acceptor = ChainAcceptor() if branch == 1 else TreeAcceptor(7, 2, ())
    said, length = say(PARAMS[name], branch, acceptor)
    assert length > 1.2, "drafts are accepted"
    assert distance(said, joint(name)) < BOUND
    if name != "softmax":
        assert distance(said, joint("softmax")) > 2 * BOUND, (
            "the test can tell whether the parameter has its effect"
        )


@pytest.mark.parametrize("name", ["softmax", "all"])
def test_a_draft_too_many_shows(name: str) -> None:
    said, _ = say(PARAMS[name], 1, Gullible())
    assert distance(said, joint(name)) > 2 * BOUND


def test_a_path_that_is_not_counted_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only speculation can make this mistake: the tokens on the path to a node are left out of the penalties."""

    def nothing(self: TreeVerifyInput) -> Tensor:
        return torch.full_like(self.mask[:, :, 1:], -1, dtype=torch.int64)

    monkeypatch.setattr(TreeVerifyInput, "paths", nothing)
    said, _ = say(PARAMS["frequency"], 1, ChainAcceptor())
    assert distance(said, joint("frequency")) > 2 * BOUND
