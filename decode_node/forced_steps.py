"""The wide steps, without a draft phase, that verify forced tokens: their sizes and composition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from common.engine.forward.model_runner import ModelRunner
from common.node.overlap import Completion
from common.node.stopwatch import stopwatch_for
from decode_node.forced_choice import ForcedChoice, ForcedStep
from decode_node.graphs.decode_graph import GREEDY, LOGITS
from decode_node.speculative.drafters.forced_chain import ForcedChain
from decode_node.speculative.rounds import Rounds
from decode_node.speculative.step import SpeculativeStep, no_seconds
from decode_node.speculative.verifier import ChainAcceptor
from decode_node.speculative.verify import Verify
from decode_node.step import DecodeSteps

# The most tokens of their forwards. Up to there a forward takes hardly longer than for one token per request, and its
# logits take 4 bytes per token and vocabulary entry.
FORCED_TOKENS = 256


def forced_steps(max_running: int, widths: Sequence[int]) -> tuple[ForcedStep, ...]:
    """Return the steps of these widths, widest first: for larger batches, fewer tokens per request."""
    steps: list[ForcedStep] = []
    for width in widths:
        batch = min(max_running, FORCED_TOKENS // (width + 1))
        if batch > (steps[-1].batch if steps else 0):
            steps.append(ForcedStep(width, batch))
    return tuple(steps)


@dataclass(frozen=True, slots=True)
class ForcedSetup:
    """The parts of which these steps are made."""

    runner: ModelRunner
    # from the smallest and the largest batch
    rounds_of: Callable[[int, int], Rounds]
    # from the rounds and the width
    chain_of: Callable[[Rounds, int], ForcedChain]
    # from a chain of any width
    choice_of: Callable[[ForcedChain], ForcedChoice]
    completion: Callable[[], Completion]
    hidden_states: bool = False


def with_forced_steps(steps: DecodeSteps, forced: Sequence[ForcedStep], setup: ForcedSetup) -> DecodeSteps:
    """Add the steps `forced` to those of a node."""
    if not forced:
        return steps
    by_width, graphs = dict[int, SpeculativeStep](), list(steps.graphs)
    device, smallest = setup.runner.pool.device, 1
    seconds = steps.phase_seconds or no_seconds()
    for width, largest in forced:
        rounds, acceptor = setup.rounds_of(smallest, largest), ChainAcceptor()
        chain = setup.chain_of(rounds, width)
        # Every batch with forced tokens is masked, and so served by the variant of logits. Capturing another one
        # compiles the kernels that follow the logits, for each number of requests.
        verify = Verify(setup.runner, rounds, chain, acceptor, (GREEDY, LOGITS), setup.hidden_states)
        watch = stopwatch_for(device)
        step = SpeculativeStep(verify, chain, acceptor, device, setup.completion, watch, seconds)
        by_width[width] = step
        graphs += step.graphs
        smallest = largest + 1
    # Chains of all widths carry and skip alike.
    rules = replace(
        steps.rules,
        forced_steps=tuple(forced),
        carried=chain.carried,
        forced_choice=setup.choice_of(chain),
    )
    return replace(steps, forced=by_width, rules=rules, graphs=graphs, phase_seconds=seconds)
