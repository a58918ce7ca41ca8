"""Series of requests, observed once per request when it is over; names, types and bounds are vLLM's.

Metrics about tokens and steps come from the nodes: they observe once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.messages.generation import FINISH_LENGTH, FINISH_STOP
from common.observability.histogram import TOKEN_SECONDS
from router.metrics.handover_metrics import HandoverMetrics
from router.metrics.histogram import BatchHistogram
from router.metrics.request_stages import PARTS, parts_of
from router.metrics.timeline import Timeline

FIRST_TOKEN_SECONDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
REQUEST_SECONDS: Final = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480),
    *(960, 1920, 7680),
)
STAGE_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
CHOICES: Final = (1, 2, 5, 10, 20)
ABORTS: Final = frozenset(("abort", "aborted", "client gone", "sibling failed"))
REASONS: Final = (FINISH_STOP, FINISH_LENGTH, "abort", "error")
SETTLED_TOGETHER: Final = 128  # requests; to count their values takes some 0.3 ms
ROUTER: Final = "router"  # the label `engine` of series that the router observes


class RequestFigures(msgspec.Struct, frozen=True):
    """The sizes of a request that is over."""

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0  # of the prompt, found by the prefill node
    max_tokens: int = 0
    choices: int = 1  # of its prompt; 0 for all but the first one of them
    longest: int | None = None  # tokens of the longest choice, once all choices of the prompt are over
    temperature: float = 0.0
    top_p: float = 1.0


def token_bounds(most: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20 ... up to `most`."""
    steps = (digit * 10**exponent for exponent in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= most)


class RequestSeries(Collector):
    """One router's requests."""

    def __init__(self, model: str, max_model_len: int, registry: CollectorRegistry) -> None:
        self._labels = {"model_name": model, "engine": ROUTER}
        self._registry = registry
        self._histograms: list[BatchHistogram] = []
        self._unsettled = 0  # requests whose values are not counted yet
        tokens = token_bounds(max_model_len)
        seconds = self._seconds
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "From the arrival to the first token", FIRST_TOKEN_SECONDS
        )
        self._e2e = seconds("vllm:e2e_request_latency_seconds", "From the arrival to the last token")
        self._queue = seconds("vllm:request_queue_time_seconds", "Until the first forward of the prompt")
        self._prefill = seconds("vllm:request_prefill_time_seconds", "From there to the first token")
        self._decode = seconds("vllm:request_decode_time_seconds", "From the first to the last token")
        self._inference = seconds("vllm:request_inference_time_seconds", "From the first forward to the end")
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token after the first one, 0 for one token",
            TOKEN_SECONDS,
        )
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Prompt length", tokens)
        self._computed = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that no prefix cache had", tokens
        )
        self._generated = self._histogram("vllm:request_generation_tokens", "Answer length", tokens)
        self._longest = self._histogram(
            "vllm:request_max_num_generation_tokens", "Length of the longest choice of a prompt", tokens
        )
        self._max_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens", tokens)
        self._choices = self._histogram("vllm:request_params_n", "n", CHOICES)
        self._transfer = self._histogram(
            "tandem_kv_transfer_seconds",
            "From the grant of pages, or the first forward if that is later, until the decode node has them all",
            STAGE_SECONDS,
            ("vllm:nixl_xfer_time_seconds",),
        )
        self._handover = HandoverMetrics(model, registry)
        self._stages = {
            name: BatchHistogram(
                "tandem_stage_seconds", "", {"model_name": model, "stage": name}, STAGE_SECONDS
            )
            for name in PARTS
        }
        self._histograms += self._stages.values()
        self._ended = dict.fromkeys(REASONS, 0)
        self._placed = 0
        registry.register(self)

    def finished(self, timeline: Timeline, figures: RequestFigures) -> None:
        """Observe a request once, when it is over."""
        stages = timeline.final_stages
        first, end, outcome = stages.get("first_token"), stages["finished"], timeline.outcome
        completed = timeline.completed
        self._unsettled += 1
        if self._unsettled >= SETTLED_TOGETHER:
            self._unsettled = 0
            for histogram in self._histograms:
                histogram.settle()
        if first is not None:
            self._ttft.add(first)
        self._handover.observe(timeline.attempts)
        self._placed += len(timeline.attempts)
        for name, begin, ended in parts_of(stages, completed):
            self._stages[name].add(ended - begin)
        seen = stages.get("decode.record_seen")
        if seen is not None and "prefill.slots" in stages:
            begun = max(stages["prefill.slots"], stages.get("prefill.prefill_start", 0.0))
            self._transfer.add(max(seen - begun, 0.0))
        if figures.longest is not None:
            self._longest.add(figures.longest)
        if figures.choices:
            self._choices.add(figures.choices)
        if not completed:
            self._ended["abort" if outcome in ABORTS else "error"] += 1
            return
        self._ended[outcome] += 1
        self._e2e.add(end)
        begun = stages.get("prefill.prefill_start", 0.0)
        first = max(begun, end if first is None else first)
        self._queue.add(begun)
        self._prefill.add(first - begun)
        self._decode.add(max(end - first, 0.0))
        self._inference.add(max(end - begun, 0.0))
        generated = figures.generated_tokens
        self._per_token.add(max(end - first, 0.0) / (generated - 1) if generated > 1 else 0.0)
        self._prompt.add(figures.prompt_tokens)
        self._computed.add(figures.prompt_tokens - figures.cached_tokens)
        self._generated.add(generated)
        self._max_tokens.add(figures.max_tokens)

    def collect(self) -> Iterator[Metric]:
        success = CounterMetricFamily(
            "vllm:request_success", "Requests by finish reason", labels=(*self._labels, "finished_reason")
        )
        for reason, count in self._ended.items():
            success.add_metric((*self._labels.values(), reason), count)
        yield success
        stages = HistogramMetricFamily(
            "tandem_stage_seconds",
            "Parts of the time of a request; together they are all of it",
            labels=("model_name", "stage"),
        )
        for histogram in self._stages.values():
            histogram.add_to(stages)
        yield stages
        decisions = CounterMetricFamily(
            "llm_d_inference_scheduler_pd_decision",
            "Placements by kind",
            labels=("model_name", "decision_type"),
        )
        decisions.add_metric((self._labels["model_name"], "prefill-decode"), self._placed)
        yield decisions

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], aliases: Sequence[str] = ()
    ) -> BatchHistogram:
        made = BatchHistogram(name, text, self._labels, bounds, self._registry, aliases)
        self._histograms.append(made)
        return made

    def _seconds(self, name: str, text: str) -> BatchHistogram:
        return self._histogram(name, text, REQUEST_SECONDS)
