"""Measures the forwards of a GPU node at its start, for its cost curve."""

from __future__ import annotations

from dataclasses import replace

import torch

from common.node.stopwatch import stopwatch_for
from prefill_node.draft import PrefillDraft
from prefill_node.graphs.prefill_extend import PrefillExtend, idle_extend

RUNS = 3  # per size, after one run that is not counted
SMALLEST = 16


def measured_sizes(largest: int) -> list[int]:
    """Return the sizes to measure, ascending: powers of two and what lies halfway, up to the largest forward."""
    sizes = {largest}
    size = SMALLEST
    while size < largest:
        sizes |= {each for each in (size, size + size // 2) if each < largest}
        size *= 2
    return sorted(sizes)


@torch.inference_mode()
def measure_forwards(
    target: PrefillExtend,
    draft: PrefillDraft,
    largest: int,
    page_size: int,
    device: torch.device,
    axes: tuple[int, ...] = (),
    state: bool = False,
) -> dict[int, float]:
    """Return the milliseconds of a prompt's forward by its tokens, target and draft; the median of RUNS runs.

    All tokens are in the padding page.

    Args:
        largest: the largest forward, in tokens.
        axes, state: as in `idle_extend`.
    """
    times: dict[int, float] = {}
    start = stopwatch_for(device)
    for tokens in measured_sizes(largest):
        batch = replace(
            idle_extend(tokens, page_size, device, axes, state),
            logits_rows=torch.tensor([tokens - 1], dtype=torch.int64, device=device),
            hidden_mode=draft.hidden_mode,
        )
        watches = []
        for _ in range(1 + RUNS):
            watch = start()
            draft.warm_up(batch, target(batch))
            watch.lap()
            watches.append(watch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times[tokens] = 1e3 * sorted(watch.seconds()[0] for watch in watches[1:])[RUNS // 2]
    return times
