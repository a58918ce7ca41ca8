"""What was captured and what ran, as data: the start-up table, `/server_info` and heartbeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.engine.cuda_graph.backends.base import Compilation
from common.engine.cuda_graph.spec import CaptureSpec, GraphKey
from common.messages.identity import GraphTotals


@dataclass(frozen=True, slots=True)
class CaptureRow:
    """One graph of the start-up table."""

    phase: str
    model: str
    backend: str
    tokens: int
    requests: int  # 0: no request axis
    variant: str
    hidden: str
    seconds: float
    nbytes: int
    breaks: int
    error: str = ""  # why it runs eagerly

    @property
    def ran_out(self) -> bool:
        """Whether it is memory that it failed for: torch's own, or the driver's, which is no OutOfMemoryError."""
        return "out of memory" in self.error

    def cells(self) -> tuple[str, ...]:
        shape = f"{self.tokens}" if self.requests == 0 else f"{self.tokens} / {self.requests}"
        return (
            *(self.phase, self.model, self.backend, shape, self.variant, self.hidden),
            *(f"{self.seconds:.2f}", f"{self.nbytes / 2**20:.1f}", self.error or f"{self.breaks} breaks"),
        )


HEADER = ("phase", "model", "backend", "tokens / requests", "variant", "hidden", "s", "MiB", "state")


def table(rows: Iterable[CaptureRow], compilation: Compilation | None = None) -> str:
    """Lines for a person, columns aligned; below them what was compiled before."""
    lines = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    if compilation is not None:
        made = f"{compilation.kinds} kinds in {compilation.pieces} pieces"
        text.append(f"compiled by {compilation.compiler} in {compilation.seconds:.2f} s: {made}")
    return "\n".join(text)


@dataclass(slots=True)
class GraphCounters:
    """Of one runner."""

    replays: Counter[GraphKey] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)  # reason -> eager runs
    live_tokens: int = 0  # of replays
    padded_tokens: int = 0  # computed in replays and thrown away

    @property
    def replay_share(self) -> float:
        """Of all runs; 1 where nothing ran."""
        replays, eager = self.replays.total(), self.fallbacks.total()
        return replays / (replays + eager) if replays + eager else 1.0

    def never_replayed(self, captured: Iterable[GraphKey]) -> list[GraphKey]:
        """Graphs that cost memory for nothing."""
        return [key for key in captured if not self.replays[key]]

    def totals(self, spec: CaptureSpec, captured: int) -> GraphTotals:
        """As they travel with heartbeats; `captured`: how many graphs there are. Cheap: asked for every turn."""
        return GraphTotals(
            phase=spec.phase,
            model=spec.model,
            replays=self.replays.total(),
            fallbacks={str(reason): count for reason, count in self.fallbacks.items()},
            live_tokens=self.live_tokens,
            padded_tokens=self.padded_tokens,
            captured=captured,
            unused=captured - len(self.replays),
        )
