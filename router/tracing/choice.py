"""Chooses how requests are traced, by the configuration and OpenTelemetry's environment variables."""

from __future__ import annotations

import os

from common.errors import ConfigError
from common.named import named
from common.observability.logs import Log
from router.tracing.traces import NO_TRACES, Traces

KEY = "router.otlp_endpoint"
VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
SERVICE = "OTEL_SERVICE_NAME"
OTLP = "router.tracing.otlp:OtlpTraces"


def make_traces(configured: str, model: str, log: Log) -> Traces:
    """Return the traces that the configuration asks for. Raises ConfigError if a package for them is missing.

    `configured`: the value of router.otlp_endpoint.
    """
    key = KEY if configured else VARIABLE
    endpoint = configured or os.environ.get(VARIABLE, "")
    if not endpoint:
        return NO_TRACES
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            key,
            f"{endpoint!r} is not a URL: write http://HOST:4318, where the collector takes OTLP over HTTP",
        )
    try:
        kind = named(OTLP)
    except ModuleNotFoundError as error:
        raise ConfigError(
            key,
            f"traces need {error.name}, which is missing: run `pip install -e '.[otel]'` in the checkout, or leave "
            "the endpoint out",
        ) from error
    traces: Traces = kind(endpoint, model, os.environ.get(SERVICE, "tandem-router"), log)
    return traces
