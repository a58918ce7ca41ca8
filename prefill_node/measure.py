"""Measures the forwards of a GPU node at its start, for its cost curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from common.engine.forward.batch import ForwardBatch
from common.node.stopwatch import Stopwatch, stopwatch_for
from common.observability.start_progress import progressed
from prefill_node.draft import PrefillDraft
from prefill_node.graphs.prefill_extend import PrefillExtend, idle_extend

RUNS = 2  # rounds over all sizes, after one that is not counted: one of them may be disturbed
MIN_TOKENS = 16
CONTEXT_SHARE = 8  # one part in this many, the last, is new in the sequence that measures context
MAX_SEQUENCE = 16_384  # tokens of that sequence


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Times of forwards in milliseconds."""

    by_tokens: dict[int, float] = field(default_factory=dict)  # for one prompt, without context
    # per token and token of its context, which earlier forwards have computed; 0.0: not measured
    context_ms: float = 0.0


NOT_MEASURED = MeasuredTimes()


@dataclass(frozen=True, slots=True)
class MeasuredNode:
    """The facts of a node on which its measurements depend."""

    largest: int  # tokens of the largest forward
    longest: int  # tokens of the longest sequence
    vocab_size: int
    page_size: int
    device: torch.device
    axes: tuple[int, ...] = ()  # the axes of the model's RopeConfig
    state: bool = False  # the model keeps a state per request

    def batch(self, tokens: int, context: int = 0) -> ForwardBatch:
        """Return random tokens of one prompt after `context` others, all in the padding page.

        Equal tokens would draw less power, and forwards would seem faster than they are.
        """
        idle = idle_extend(tokens, self.page_size, self.device, self.axes, self.state)
        total = context + tokens
        return replace(
            idle,
            input_ids=torch.randint(self.vocab_size, (tokens,), device=self.device),
            page_table=idle.page_table.new_zeros(1, -(-total // self.page_size)),
            seq_lens=torch.full_like(idle.seq_lens, total),
            max_seq_len=total,
            seq_lens_host=(total,),
            logits_rows=torch.tensor([tokens - 1], device=self.device),
        )


def measured_sizes(largest: int) -> list[int]:
    """Return the sizes to measure, ascending: powers of two and what lies halfway, up to the largest forward."""
    sizes = {largest}
    size = MIN_TOKENS
    while size < largest:
        sizes |= {each for each in (size, size + size // 2) if each < largest}
        size *= 2
    return sorted(sizes)


@torch.inference_mode()
def measure_forwards(target: PrefillExtend, draft: PrefillDraft, node: MeasuredNode) -> MeasuredTimes:
    """Run forwards of several sizes, target and draft, and one after a long context; the shortest of RUNS runs each."""
    largest = min(node.largest, node.longest)
    sizes = measured_sizes(largest)
    times = dict(
        zip(sizes, _measure(target, draft, node, [node.batch(tokens) for tokens in sizes]), strict=True)
    )
    sequence = min(node.longest, MAX_SEQUENCE)
    tokens = min(max(sequence // CONTEXT_SHARE, 1), largest)
    context = sequence - tokens
    if not context:
        return MeasuredTimes(times)
    alone, after = _measure(target, draft, node, [node.batch(tokens), node.batch(tokens, context)])
    return MeasuredTimes(times, max(after - alone, 0.0) / tokens / context)


def _measure(
    target: PrefillExtend, draft: PrefillDraft, node: MeasuredNode, batches: Sequence[ForwardBatch]
) -> list[float]:
    """Return the milliseconds of a forward of each batch.

    The batches take turns, and the shortest run of each counts: a disturbance of one round changes nothing. A size
    whose time is overestimated might never be chosen again, and its time never corrected.
    """
    start, rounds = stopwatch_for(node.device), list[list[Stopwatch]]()
    batches = [replace(batch, hidden_mode=draft.hidden_mode) for batch in batches]
    for _ in range(1 + RUNS):
        rounds.append([])
        for batch in batches:
            watch = start()
            draft.warm_up(batch, target(batch))
            watch.lap()
            progressed("run a forward to measure it")
            rounds[-1].append(watch)
    if node.device.type == "cuda":
        torch.cuda.synchronize(node.device)
    return [1e3 * min(watch.seconds()[0] for watch in watches) for watches in zip(*rounds[1:], strict=True)]
