"""Reports which graphs were captured and what ran, as data: start-up table, `/server_info`, heartbeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.engine.graphs.backends.base import GraphCompilation
from common.engine.graphs.spec import CaptureSpec, GraphKey
from common.messages.identity import GraphReport, GraphTotals


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
    error: str = ""  # the reason for running eagerly

    @property
    def ran_out(self) -> bool:
        """True if it failed for lack of memory; the driver's error is not a torch.OutOfMemoryError."""
        return "out of memory" in self.error

    def cells(self) -> tuple[str, ...]:
        shape = f"{self.tokens}" if self.requests == 0 else f"{self.tokens} / {self.requests}"
        return (
            *(self.phase, self.model, self.backend, shape, self.variant, self.hidden),
            *(f"{self.seconds:.2f}", f"{self.nbytes / 2**20:.1f}", self.error or f"{self.breaks} breaks"),
        )


HEADER = ("phase", "model", "backend", "tokens / requests", "variant", "hidden", "s", "MiB", "state")
NODE_HEADER = ("phase", "model", "backend", "shapes", "hidden", "graphs", "s", "MiB", "state")
SPELLED = 6  # shapes spelled out per row; of more, only the first ones and the last
MAX_REASON = 300  # characters


def table(rows: Iterable[CaptureRow], compilation: GraphCompilation | None = None) -> str:
    """Return the table of every graph of one forward, for people, with what was compiled before at its end."""
    lines = _aligned(HEADER, (row.cells() for row in rows))
    if compilation is not None:
        made = f"{compilation.kinds} kinds in {compilation.pieces} pieces"
        lines.append(f"compiled by {compilation.compiler} in {compilation.seconds:.2f} s: {made}")
    return "\n".join(lines)


def start_report(
    spec: CaptureSpec,
    backend: str,
    reasons: tuple[str, ...],
    rows: Sequence[CaptureRow],
    compilation: GraphCompilation | None,
) -> GraphReport:
    """Return the report of one forward: `rows` of its captures, `backend` and `reasons` as decided at start-up."""
    by_tokens = spec.tokens_per_request is None
    noun = "images" if spec.phase == "encoder" else "requests"
    width = spec.tokens_per_request or 1
    of_width = noun if width == 1 else f"{noun} of {width} tokens"
    failed = {}
    for row in rows:
        if row.error:
            size = str(row.tokens if by_tokens else row.requests)
            name = size if len(spec.variants) == 1 else f"{size} {row.variant}"
            failed[name] = row.error[:MAX_REASON]
    return GraphReport(
        phase=spec.phase,
        model=spec.model,
        backend=backend,
        hidden_mode=spec.hidden.name,
        unit="tokens" if by_tokens else of_width,
        shapes=tuple(shape.tokens if by_tokens else shape.requests for shape in spec.shapes),
        captured=sum(not row.error for row in rows),
        failed=failed,
        seconds=round(sum((row.seconds for row in rows), 0.0), 2),
        mib=round(sum(row.nbytes for row in rows) / 2**20, 1),
        compiler="" if compilation is None else compilation.compiler,
        compile_seconds=0.0 if compilation is None else round(compilation.seconds, 2),
        pieces=0 if compilation is None else compilation.pieces,
        reasons=reasons,
    )


def node_table(reports: Iterable[GraphReport]) -> list[str]:
    """Return the lines of a node's start-up table, one per forward, for people."""
    return _aligned(NODE_HEADER, (_cells(each) for each in reports))


def _cells(row: GraphReport) -> tuple[str, ...]:
    shapes = [str(shape) for shape in row.shapes]
    if len(shapes) > SPELLED:
        shapes[SPELLED - 1 : -1] = [".."]
    state = [f"compiled by {row.compiler} in {row.compile_seconds:.2f} s"] if row.compiler else []
    by_reason: dict[str, list[str]] = {}
    for graph, reason in row.failed.items():
        by_reason.setdefault(reason, []).append(graph)
    state += [f"eager: {', '.join(graphs)}: {reason}" for reason, graphs in by_reason.items()]
    state += row.reasons
    return (
        *(row.phase, row.model, row.backend),
        " ".join((*shapes, row.unit)) if shapes else "always eager",
        *(row.hidden_mode, str(row.captured), f"{row.seconds:.2f}", f"{row.mib:.1f}", "; ".join(state)),
    )


def _aligned(header: tuple[str, ...], cells: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [header, *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]


@dataclass(slots=True)
class GraphCounters:
    """Counts what one runner replays and what it runs eagerly."""

    replays: Counter[GraphKey] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)  # reason -> eager runs
    live_tokens: int = 0  # in replays
    padded_tokens: int = 0  # computed in replays and discarded

    def totals(self, spec: CaptureSpec, captured: int) -> GraphTotals:
        """Return the counts for a heartbeat; `captured` is the number of graphs. Cheap: called in every turn."""
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
