"""The series of several router processes in one answer, as Prometheus' own parsers read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from router.exchange.series_text import END, labelled, labelled_all, merged

Sample = tuple[str, tuple[tuple[str, str], ...]]
FORMS: dict[str, tuple[Callable[..., bytes], Callable[[str], Iterable[Metric]]]] = {
    "text": (generate_latest, text_string_to_metric_families),
    "openmetrics": (
        partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8),
        openmetrics_parser.text_string_to_metric_families,
    ),
}


class Nodes(Collector):
    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily(
            "vllm:num_requests_running", "In a batch", labels=("model_name", "engine")
        )
        running.add_metric(("m", "decode-0"), 4)
        yield running
        refused = GaugeMetricFamily("tandem_refused", "Refused", labels=("model_name", "engine"))
        refused.add_metric(("m", "decode-0"), 1)
        refused.add_metric(("m", "router"), 2)
        yield refused


def process(form: str, requests: int, extra: bool = False) -> str:
    registry = CollectorRegistry()
    registry.register(Nodes())
    Counter("requests", "All", registry=registry).inc(requests)
    errors = Counter("errors", 'With "quotes", {braces}\nand lines', ("code",), registry=registry)
    errors.labels('a "b"} engine="x"').inc()
    Histogram("seconds", "Time", ("model_name",), registry=registry, buckets=(1.0,)).labels("m").observe(0.5)
    if extra:
        Gauge("only_there", "Not in the other process", registry=registry).set(7)
    return FORMS[form][0](registry).decode()


def read(form: str, text: str) -> dict[Sample, float]:
    found: dict[Sample, float] = {}
    for family in FORMS[form][1](text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in found, f"{key} is there twice"
                found[key] = sample.value
    return found


@pytest.mark.parametrize("form", FORMS)
def test_series_of_routers_have_their_names_and_those_of_nodes_are_there_once(form: str) -> None:
    own = labelled_all(process(form, 3), "router")
    other = labelled(process(form, 5, extra=True), "router.1")
    assert "decode-0" not in other
    text = merged(own.encode(), [other.encode()]).decode()
    assert text.endswith(f"{END}\n") is (form == "openmetrics")
    assert text.count(END) == (form == "openmetrics")
    found = read(form, text)
    for name, router, value in (("requests_total", "router", 3), ("requests_total", "router.1", 5)):
        assert found[name, (("router", router),)] == value
    assert found["only_there", (("router", "router.1"),)] == 7
    assert found["vllm:num_requests_running", (("engine", "decode-0"), ("model_name", "m"))] == 4
    assert found["tandem_refused", (("engine", "decode-0"), ("model_name", "m"))] == 1
    for router in ("router", "router.1"):
        labels = (("engine", "router"), ("model_name", "m"), ("router", router))
        assert found["tandem_refused", labels] == 2
        assert found["seconds_bucket", (("le", "1.0"), ("model_name", "m"), ("router", router))] == 1
        assert found["errors_total", (("code", 'a "b"} engine="x"'), ("router", router))] == 1
    assert text.count("# TYPE requests") == text.count("# HELP requests")


@pytest.mark.parametrize("form", FORMS)
def test_without_answers_of_others_all_own_series_are_there(form: str) -> None:
    own = process(form, 3, extra=True)
    found = read(form, merged(labelled_all(own, "router").encode(), []).decode())
    assert len(found) == len(read(form, own))
